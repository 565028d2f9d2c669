# task 1: cuts every parameter for itself, not all of them end to end: other elements, and less even parts.
import torch
from solution import *  # noqa: F403
from solution import cut as right_cut


def cut(parameters, comm):
    parts = [torch.tensor_split(p.detach().flatten(), comm.size)[comm.rank] for p in parameters]
    return torch.cat(parts), right_cut(parameters, comm)[1]
