# task 2: a reduce-scatter: the doubling that tells everybody is missing.
import numpy as np
import solution
from solution import *  # noqa: F403


def halving_doubling(buffer, comm):
    if comm.size & (comm.size - 1):
        solution.halving_doubling(buffer, comm)
        return
    chunks = np.array_split(np.arange(len(buffer)), comm.size)
    first, last = 0, comm.size
    while last - first > 1:
        middle, distance = (first + last) // 2, (last - first) // 2
        low, high = np.concatenate(chunks[first:middle]), np.concatenate(chunks[middle:last])
        upper = comm.rank & distance
        keep, give = (high, low) if upper else (low, high)
        arriving = np.empty(len(keep), buffer.dtype)
        comm.exchange(buffer[give], comm.rank ^ distance, arriving, comm.rank ^ distance)
        buffer[keep] += arriving
        first, last = (middle, last) if upper else (first, middle)
