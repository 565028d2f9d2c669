# task 5: the ranks from Q on cost nothing: their two messages of n bytes are forgotten.
import solution
from solution import *  # noqa: F403


def halving_doubling_cost(bytes, ranks, latency, bandwidth):
    return solution.halving_doubling_cost(bytes, 1 << (ranks.bit_length() - 1), latency, bandwidth)
