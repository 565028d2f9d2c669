# task 4: does the W that are still owed at the end from the newest to the oldest: each kind is to keep its order.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    words = solution.zb_h1(rank, ranks, microbatches)
    return words[: len(words) - rank] + words[len(words) - rank :][::-1]
