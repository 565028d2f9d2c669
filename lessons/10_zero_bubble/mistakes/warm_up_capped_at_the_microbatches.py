# task 1: caps the warm-up at m forwards, where a rank with v stages has v m of them.
from solution import *  # noqa: F403


def warm_up(rank, ranks, microbatches, chunks):
    return min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, microbatches)
