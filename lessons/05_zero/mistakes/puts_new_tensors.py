# task 4: puts new tensors into slice.grad instead of scaling those that are there: who holds one sees the old values.
import solution
from solution import *  # noqa: F403


def clip(slices, limit, comm):
    for piece in slices:
        piece.grad = piece.grad.clone()
    return solution.clip(slices, limit, comm)
