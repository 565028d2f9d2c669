# task 5: charges the whole buffer in every step of the ring, where a step sends a P-th of it.
import solution
from solution import *  # noqa: F403


def cost(algorithm, bytes, ranks, latency, bandwidth):
    return solution.cost(algorithm, bytes * (ranks if algorithm == "ring" else 1), ranks, latency, bandwidth)
