# task 2: computes with the blocks of later ranks, too, and throws the result away.
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
        more, its = output.clone(), lse.clone()
        meet(query, more, its, *block, step == 0)
        if step <= comm.rank:
            output, lse = more, its
    return output, lse
