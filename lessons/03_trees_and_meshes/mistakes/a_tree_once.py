# task 5: counts the tree once: an all-reduce by trees is a reduce and a broadcast.
import solution
from solution import *  # noqa: F403


def cost(algorithm, bytes, ranks, latency, bandwidth):
    whole = solution.cost(algorithm, bytes, ranks, latency, bandwidth)
    return whole / 2 if algorithm == "tree" else whole
