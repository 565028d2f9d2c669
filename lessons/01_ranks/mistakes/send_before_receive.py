# task 2: every rank sends both ends before it receives: all wait for each other. (Small messages hide it under mpirun.)
import numpy as np
import solution
from solution import *  # noqa: F403


def halo(piece, width, comm):
    if comm.size == 1:
        return solution.halo(piece, width, comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    before, after = np.empty_like(piece[:width]), np.empty_like(piece[:width])
    comm.send(piece[-width:], right)
    comm.send(piece[:width], left)
    comm.recv(before, left)
    comm.recv(after, right)
    return np.concatenate([before, piece, after])
