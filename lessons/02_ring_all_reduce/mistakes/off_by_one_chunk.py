# task 1: starts with its own chunk, so each rank ends with the sum of its right neighbour's chunk.
import numpy as np
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = chunks[comm.rank].copy()
    for step in range(comm.size - 1):
        own = chunks[(comm.rank - step - 1) % comm.size]
        arriving = np.empty_like(own)
        comm.exchange(leaving, right, arriving, left)
        leaving = arriving + own
    return leaving
