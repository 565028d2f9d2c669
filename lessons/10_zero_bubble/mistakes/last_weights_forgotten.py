# task 4: the W that are still owed at the end are never done: the last rank lacks the gradients of p - 1 microbatches.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    words = solution.zb_h1(rank, ranks, microbatches)
    return words[: len(words) - rank]
