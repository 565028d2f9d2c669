# task 5: puts P into the formula for a power of two: no rank takes 2.58 rounds.
import math

from solution import *  # noqa: F403


def halving_doubling_cost(bytes, ranks, latency, bandwidth):
    return 2 * math.log2(ranks) * latency + 2 * (ranks - 1) / ranks * bytes / bandwidth
