# task 1: every rank waits for its left neighbour before it sends, rank 0 as well: nobody ever begins.
import numpy as np
from solution import *  # noqa: F403


def pass_token(own, comm):
    if comm.size == 1:
        return own.copy()
    token = np.empty_like(own)
    comm.recv(token, (comm.rank - 1) % comm.size)
    token = own.copy() if comm.rank == 0 else token + own
    comm.send(token, (comm.rank + 1) % comm.size)
    return token
