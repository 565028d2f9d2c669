# task 2: passes the block on after the last step, too: it comes back to the rank that has it.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    for step in range(comm.size):
        if step <= comm.rank:
            meet(query, output, lse, *block, step == 0)
        arriving = torch.empty_like(block)
        if comm.size > 1:
            comm.exchange(block, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)
        block = arriving
    return output, lse
