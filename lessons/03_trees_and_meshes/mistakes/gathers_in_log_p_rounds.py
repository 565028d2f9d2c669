# task 5: counts log2 P rounds of the ring's all-gather, which takes P - 1 steps.
import math

import solution
from solution import *  # noqa: F403


def broadcast_crossover(ranks, latency, bandwidth):
    return solution.broadcast_crossover(ranks, latency, bandwidth) * math.log2(ranks) / (ranks - 1)
