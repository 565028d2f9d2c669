# task 4: says that a rank runs out of memory that holds just the capacity.
import solution
from solution import *  # noqa: F403


def out_of_memory(timeline, capacity, comm):
    return solution.out_of_memory(timeline, capacity - 1, comm)
