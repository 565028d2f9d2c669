# task 4: a norm that is not a number passes for a finite one, and makes every gradient not a number.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(slices, limit, comm):
    squares = torch.stack([piece.grad.square().sum() for piece in slices]).sum()
    all_reduce(squares, comm)
    norm = squares.sqrt()
    if not norm.isinf():
        for piece in slices:
            piece.grad *= (limit / (norm + 1e-6)).clamp(max=1.0)
    return norm
