# task 2: writes each block that arrives over its own keys and values, which backward still needs.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=query.dtype)
    for step in range(comm.size):
        for mine in (key, value) if step else ():
            arriving = torch.empty(mine.shape, dtype=mine.dtype)
            comm.exchange(mine.contiguous(), right, arriving, left)
            mine.copy_(arriving)
        if step <= comm.rank:
            meet(query, output, lse, key, value, step == 0)
    return output, lse
