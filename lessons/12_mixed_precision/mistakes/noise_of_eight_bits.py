# task 1: draws eight bits of noise and shifts them up, so what lies just beyond a bfloat16 never goes up.
import numpy as np
from solution import *  # noqa: F403


def round_at_random(x, random):
    noise = random.integers(0, 2**8, size=x.shape, dtype=np.uint32) << 8
    return ((x.view(np.uint32) + noise) >> 16).astype(np.uint16)
