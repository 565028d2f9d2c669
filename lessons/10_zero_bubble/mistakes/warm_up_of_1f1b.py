# task 1: p - r - 1 as in plain 1F1B, behind the first chunks: a gradient that comes back is not counted.
from solution import *  # noqa: F403


def warm_up(rank, ranks, microbatches, chunks):
    return min(ranks - rank - 1 + (chunks - 1) * ranks, microbatches * chunks)
