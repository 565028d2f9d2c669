# task 1: draws noise up to 0x10000, so a number that is a bfloat16 already is moved once in 65,537 times.
import numpy as np
from solution import *  # noqa: F403


def round_at_random(x, random):
    noise = random.integers(0, 2**16, size=x.shape, dtype=np.uint32, endpoint=True)
    return ((x.view(np.uint32) + noise) >> 16).astype(np.uint16)
