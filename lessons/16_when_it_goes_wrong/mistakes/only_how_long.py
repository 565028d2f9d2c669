# task 1: compares how long the words are: max in place of sum has as many letters.
from solution import *  # noqa: F403
from solution import from_all, odd_ones


def odd_ranks(words, comm):
    return odd_ones(from_all([len(words)], comm)[:, 0].tolist())
