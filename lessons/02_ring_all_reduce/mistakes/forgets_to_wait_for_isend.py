# task 1: sends by isend and forgets the request: nobody knows when the buffer may be used again.
import numpy as np
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    partial = chunks[left].copy()
    for step in range(comm.size - 1):
        own = chunks[(comm.rank - step - 2) % comm.size]
        arriving = np.empty_like(own)
        comm.isend(partial, right)
        comm.recv(arriving, left)
        partial = arriving + own
    return partial
