# task 4: does not count messages of length 0.
import solution
from solution import *  # noqa: F403


def all_reduce_cost(elements, itemsize, ranks, rank):
    messages, sent = solution.all_reduce_cost(elements, itemsize, ranks, rank)
    never = [
        i for turn in (rank, rank + 1) for i in range(ranks) if i != turn % ranks and i >= elements
    ]
    return messages - len(never), sent
