# task 1: has rank 0 of both axes write alone, which does not hold the blocks and slices of the others.
from solution import *  # noqa: F403


def pieces_to_write(tensors, dp, tp):
    if dp.rank or tp.rank:
        return {}
    return {name: (0, held.shape[0] * held.shape[1]) for name, held in tensors.items()}
