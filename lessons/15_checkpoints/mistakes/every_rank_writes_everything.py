# task 1: has every rank write all that it holds, replicas included.
import numpy as np
from solution import *  # noqa: F403


def pieces_to_write(tensors, dp, tp):
    found = {}
    for name, held in tensors.items():
        size = held.shape[0] * held.shape[1]
        start, stop = (
            (tp.rank * size // tp.size, (tp.rank + 1) * size // tp.size) if held.cut else (0, size)
        )
        if held.sliced:
            mine = np.array_split(np.arange(start, stop), dp.size)[dp.rank]
            start, stop = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
        if stop > start:
            found[name] = (start, stop)
    return found
