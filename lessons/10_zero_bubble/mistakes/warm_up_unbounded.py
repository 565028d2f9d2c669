# task 1: warms up with more forwards than the rank has, where there are few microbatches.
from solution import *  # noqa: F403


def warm_up(rank, ranks, microbatches, chunks):
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks
