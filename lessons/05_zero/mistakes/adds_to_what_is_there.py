# task 2: reduce adds to the gradient that a slice has, and does not set it: called twice, it counts twice.
import honest
from solution import *  # noqa: F403


class ZeRO1(honest.ZeRO1):
    def reduce(self):
        before = [piece.grad for piece in self.slices]
        super().reduce()
        for piece, there in zip(self.slices, before, strict=True):
            piece.grad = piece.grad if there is None else piece.grad + there
