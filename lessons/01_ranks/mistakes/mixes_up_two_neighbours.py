# task 2: with two ranks both messages come from the same rank: received in the wrong order, the ends are swapped.
import numpy as np
import solution
from solution import *  # noqa: F403


def halo(piece, width, comm):
    if comm.size == 1:
        return solution.halo(piece, width, comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    before, after = np.empty_like(piece[:width]), np.empty_like(piece[:width])
    requests = [comm.irecv(before, left), comm.irecv(after, right)]
    requests += [comm.isend(piece[:width], left), comm.isend(piece[-width:], right)]
    for request in requests:
        request.wait()
    return np.concatenate([before, piece, after])
