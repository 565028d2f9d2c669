# task 4: all-reduces one number for each slice instead of one for all.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def clip(slices, limit, comm):
    total = 0.0
    for piece in slices:
        square = piece.grad.square().sum()
        all_reduce(square, comm)
        total = total + square
    norm = total.sqrt()
    if norm.isfinite():
        for piece in slices:
            piece.grad *= (limit / (norm + 1e-6)).clamp(max=1.0)
    return norm
