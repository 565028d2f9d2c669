# task 1: sends everything it has in each step instead of the one chunk whose turn it is: P times the bytes.
import numpy as np
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    total, leaving = np.concatenate(chunks), np.concatenate(chunks)
    for _ in range(comm.size - 1):
        arriving = np.empty_like(leaving)
        comm.exchange(leaving, right, arriving, left)
        total += arriving
        leaving = arriving
    first = sum(len(chunk) for chunk in chunks[: comm.rank])
    return total[first : first + len(chunks[comm.rank])]
