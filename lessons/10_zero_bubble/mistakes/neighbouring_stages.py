# task 1: gives each rank neighbouring stages: then they are one longer stage, and nothing is won.
from solution import *  # noqa: F403


def stages_of(rank, ranks, chunks):
    return list(range(rank * chunks, (rank + 1) * chunks))
