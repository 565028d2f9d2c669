# task 4: adds up the ranks' norms; it is their squares that add up.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(slices, limit, comm):
    norm = torch.cat([piece.grad for piece in slices]).norm()
    all_reduce(norm, comm)
    for piece in slices:
        piece.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0)
    return norm
