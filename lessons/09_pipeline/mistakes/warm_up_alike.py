# task 4: every rank warms up like the first one, so the last holds p microbatches where one is enough.
import solution
from solution import *  # noqa: F403


def one_forward_one_backward(rank, ranks, microbatches):
    return solution.one_forward_one_backward(0, ranks, microbatches)
