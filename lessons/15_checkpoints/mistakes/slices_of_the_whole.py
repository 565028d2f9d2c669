# task 1: deals the whole tensor out to dp where ZeRO deals out this rank's block of it.
import numpy as np
import solution
from solution import *  # noqa: F403


def pieces_to_write(tensors, dp, tp):
    found = solution.pieces_to_write(tensors, dp, tp)
    for name, held in tensors.items():
        if held.sliced and name in found:
            mine = np.array_split(np.arange(held.shape[0] * held.shape[1]), dp.size)[dp.rank]
            found[name] = (int(mine[0]), int(mine[-1]) + 1)
    return found
