# task 2: sends its own block to each rank by itself instead of passing on what came: not along the ring.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    meet(query, output, lse, *block, True)
    for step in range(1, comm.size):
        arriving = torch.empty_like(block)
        comm.exchange(
            block, (comm.rank + step) % comm.size, arriving, (comm.rank - step) % comm.size
        )
        if step <= comm.rank:
            meet(query, output, lse, *arriving, False)
    return output, lse
