# task 1: takes Python's hash for a digest: of a text it is another in each process.
from solution import *  # noqa: F403
from solution import from_all, odd_ones


def odd_ranks(words, comm):
    return odd_ones(from_all([hash(words)], comm)[:, 0].tolist())
