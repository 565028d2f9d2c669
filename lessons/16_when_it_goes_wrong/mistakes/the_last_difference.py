# task 2: returns the last array that differs, not the first.
import solution
from solution import *  # noqa: F403


def first_difference(arrays, comm):
    return solution.first_difference(dict(reversed(arrays.items())), comm)
