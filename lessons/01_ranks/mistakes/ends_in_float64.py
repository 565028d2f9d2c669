# task 2: what comes is received into arrays of float64, the dtype of np.empty, whatever the piece is.
import numpy as np
import solution
from solution import *  # noqa: F403


def halo(piece, width, comm):
    if comm.size == 1:
        return solution.halo(piece, width, comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    before, after = np.empty(width), np.empty(width)
    comm.exchange(piece[-width:].astype(float), right, before, left)
    comm.exchange(piece[:width].astype(float), left, after, right)
    return np.concatenate([before, piece, after])
