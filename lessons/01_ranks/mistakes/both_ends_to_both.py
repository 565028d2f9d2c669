# task 2: sends both of its ends to both neighbours, who need one each: twice the bytes.
import numpy as np
import solution
from solution import *  # noqa: F403


def halo(piece, width, comm):
    if comm.size == 1:
        return solution.halo(piece, width, comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ends = np.concatenate([piece[:width], piece[-width:]])
    before, after = np.empty_like(ends), np.empty_like(ends)
    comm.exchange(ends, right, before, left)
    comm.exchange(ends, left, after, right)
    return np.concatenate([before[width:], piece, after[:width]])
