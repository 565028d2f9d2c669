# task 2: sends its first elements to the right and its last ones to the left.
import numpy as np
from solution import *  # noqa: F403


def halo(piece, width, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first, last = piece[:width].copy(), piece[-width:].copy()
    before, after = first.copy(), last.copy()
    if comm.size > 1:
        comm.exchange(first, right, before, left)
        comm.exchange(last, left, after, right)
    return np.concatenate([before, piece, after])
