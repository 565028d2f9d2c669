# task 2: gathers the hidden channels after the column-parallel product, only to cut them again: two more collectives.
import torch
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import copy_to, reduce_from

from minidist.full.adjoint import gather_from, scatter_to
from minidist.full.collectives import all_gather


def parallel_mlp(x, mine, comm):
    pieces = F.linear(copy_to(x, comm), mine["up.weight"], mine["up.bias"])
    channels = int(all_gather(torch.tensor([pieces.shape[-1]]), comm, counts=[1] * comm.size).sum())
    hidden = F.gelu(gather_from(pieces, comm, -1, channels))
    return (
        reduce_from(F.linear(scatter_to(hidden, comm, -1), mine["down.weight"]), comm)
        + mine["down.bias"]
    )
