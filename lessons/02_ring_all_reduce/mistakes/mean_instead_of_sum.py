# task 3: divides by the number of ranks: that is the mean.
import solution
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    solution.ring_all_reduce(buffer, comm)
    buffer //= comm.size
