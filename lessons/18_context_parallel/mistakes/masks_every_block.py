# task 2: masks every block, though all keys of an earlier rank come before the queries.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    for step in range(comm.size):
        if step:
            arriving = torch.empty_like(block)
            comm.exchange(block, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)
            block = arriving
        if step <= comm.rank:
            meet(query, output, lse, *block, True)
    return output, lse
