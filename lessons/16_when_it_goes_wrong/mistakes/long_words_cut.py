# task 1: cuts words after 32 letters, so what comes later is not seen.
import solution
from solution import *  # noqa: F403


def odd_ranks(words, comm):
    return solution.odd_ranks(words[:32], comm)
