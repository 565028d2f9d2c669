# task 4: returns the norm as a vector of one element.
import solution
from solution import *  # noqa: F403


def clip(slices, limit, comm):
    return solution.clip(slices, limit, comm).reshape(1)
