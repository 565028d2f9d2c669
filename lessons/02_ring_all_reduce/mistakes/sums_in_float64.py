# task 1: adds up in float64 and sends that, whatever the chunks are: twice the bytes of float32, another dtype.
import numpy as np
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    partial = chunks[left].astype(np.float64)
    for step in range(comm.size - 1):
        own = chunks[(comm.rank - step - 2) % comm.size]
        arriving = np.empty(len(own))
        comm.exchange(partial, right, arriving, left)
        partial = arriving + own
    return partial
