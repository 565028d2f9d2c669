# task 2: the first rank has no left neighbour and the last no right one: that is a line, not a ring.
import numpy as np
from solution import *  # noqa: F403


def halo(piece, width, comm):
    before, after, requests = np.zeros_like(piece[:width]), np.zeros_like(piece[:width]), []
    if comm.rank > 0:
        requests += [comm.irecv(before, comm.rank - 1), comm.isend(piece[:width], comm.rank - 1)]
    if comm.rank < comm.size - 1:
        requests += [comm.irecv(after, comm.rank + 1), comm.isend(piece[-width:], comm.rank + 1)]
    for request in requests:
        request.wait()
    return np.concatenate([before, piece, after])
