# task 1: one rank alone returns the caller's own chunk, so whoever adds to the sum changes the input.
import solution
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    return chunks[0] if comm.size == 1 else solution.ring_reduce_scatter(chunks, comm)
