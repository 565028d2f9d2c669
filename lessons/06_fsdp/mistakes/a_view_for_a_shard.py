# task 1: the shard is a view, so all parameters stay alive for the sake of a part of them.
import torch
from solution import *  # noqa: F403
from solution import cut as right_cut


def cut(parameters, comm):
    _, held = right_cut(parameters, comm)
    return torch.tensor_split(torch.cat([p.detach().flatten() for p in parameters]), comm.size)[
        comm.rank
    ], held
