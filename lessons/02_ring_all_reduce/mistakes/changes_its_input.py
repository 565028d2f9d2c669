# task 1: adds up inside the caller's chunks, which have to stay as they are.
import numpy as np
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        leaving, own = (
            chunks[(comm.rank - step - 1) % comm.size],
            chunks[(comm.rank - step - 2) % comm.size],
        )
        arriving = np.empty_like(own)
        comm.exchange(leaving, right, arriving, left)
        own += arriving
    return chunks[comm.rank]
