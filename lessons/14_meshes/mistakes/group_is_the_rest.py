# task 1: returns the ranks that share the coordinate on the axis, instead of those that share all others.
import math

import solution
from solution import *  # noqa: F403


def group(axis, rank, sizes):
    mine = solution.coordinates(rank, sizes)[axis]
    ranks = range(math.prod(sizes.values()))
    return [other for other in ranks if solution.coordinates(other, sizes)[axis] == mine]
