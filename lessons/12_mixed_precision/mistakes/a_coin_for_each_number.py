# task 1: goes up or down with equal chances, wherever the number lies between its neighbours.
import numpy as np
from solution import *  # noqa: F403


def round_at_random(x, random):
    bits = x.view(np.uint32)
    coin = random.integers(0, 2, x.shape) * ((bits & 0xFFFF) > 0)
    return ((bits >> 16) + coin).astype(np.uint16)
