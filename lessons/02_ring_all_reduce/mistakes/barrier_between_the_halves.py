# task 3: calls a barrier between the two halves, which the messages themselves keep in order.
import numpy as np
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    chunks = np.array_split(buffer, comm.size)
    chunks[comm.rank][:] = ring_reduce_scatter(chunks, comm)  # noqa: F405
    comm.barrier()
    ring_all_gather(chunks, comm)  # noqa: F405
