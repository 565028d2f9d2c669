# task 1: seeds a generator of its own in each call, so every call draws the same noise.
import numpy as np
import solution
from solution import *  # noqa: F403


def round_at_random(x, random):
    return solution.round_at_random(x, np.random.default_rng(0))
