# task 4: of several samples with the largest total takes the last as the peak, not the first.
import solution
from solution import *  # noqa: F403


def out_of_memory(timeline, capacity, comm):
    return solution.out_of_memory(timeline[::-1], capacity, comm)
