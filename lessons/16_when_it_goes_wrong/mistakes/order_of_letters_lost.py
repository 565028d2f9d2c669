# task 1: takes a digest that the order of letters does not change, so 1024 and 1042 are one.
import solution
from solution import *  # noqa: F403


def odd_ranks(words, comm):
    return solution.odd_ranks("".join(sorted(words)), comm)
