# task 1: waits for all ranks in a barrier before each step: ceil(log2 P) messages more a step, for nothing.
import solution
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    for _ in range(comm.size - 1):
        comm.barrier()
    return solution.ring_reduce_scatter(chunks, comm)
