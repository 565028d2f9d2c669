# task 4: a rank whose slices are all empty takes no part in the all-reduce: the others wait for it.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(slices, limit, comm):
    squares = torch.stack([piece.grad.square().sum() for piece in slices]).sum()
    if any(piece.numel() for piece in slices):
        all_reduce(squares, comm)
    norm = squares.sqrt()
    if norm.isfinite():
        for piece in slices:
            piece.grad *= (limit / (norm + 1e-6)).clamp(max=1.0)
    return norm
