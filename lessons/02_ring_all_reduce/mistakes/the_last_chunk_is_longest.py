# task 3: cuts equal chunks, and the last one takes what is left, instead of numpy.array_split's.
import numpy as np
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    chunks = np.split(buffer, [len(buffer) // comm.size * i for i in range(1, comm.size)])
    chunks[comm.rank][:] = ring_reduce_scatter(chunks, comm)  # noqa: F405
    ring_all_gather(chunks, comm)  # noqa: F405
