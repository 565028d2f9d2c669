# task 3: has a batch of a fixed size on each rank, so the global batch depends on their number.
import solution
from solution import *  # noqa: F403


def microbatches(order, step, batch, largest, ranks, rank):
    return solution.microbatches(order, step, batch * ranks, largest, ranks, rank)
