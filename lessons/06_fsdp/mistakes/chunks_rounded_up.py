# task 1: cuts into pieces of ceil(n / P) as torch.chunk does, so the last ranks get less, or nothing at all.
import torch
from solution import *  # noqa: F403
from solution import cut as right_cut


def cut(parameters, comm):
    flat = torch.cat([p.detach().flatten() for p in parameters])
    size = -(-len(flat) // comm.size)
    return flat[comm.rank * size : (comm.rank + 1) * size].clone(), right_cut(parameters, comm)[1]
