# task 2: keeps every block that comes by, and attends to them all at the end: the keys of all ranks on each rank.
import torch
from solution import *  # noqa: F403
from solution import meet


def ring_forward(query, key, value, comm):
    output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
    block = torch.stack((key, value))
    collected = [block]
    for _ in range(comm.size - 1):
        collected.append(torch.empty_like(block))
        comm.exchange(
            collected[-2], (comm.rank + 1) % comm.size, collected[-1], (comm.rank - 1) % comm.size
        )
    for step, block in enumerate(collected[: comm.rank + 1]):
        meet(query, output, lse, *block, step == 0)
    return output, lse
