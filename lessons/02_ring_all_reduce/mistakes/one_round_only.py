# task 4: counts the reduce-scatter and forgets the all-gather.
from solution import *  # noqa: F403


def all_reduce_cost(elements, itemsize, ranks, rank):
    return ranks - 1, (ranks - 1) * elements * itemsize // ranks
