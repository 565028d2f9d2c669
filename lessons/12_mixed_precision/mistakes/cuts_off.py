# task 1: cuts the lower half off instead of rounding, so every number moves towards zero.
import numpy as np
from solution import *  # noqa: F403


def to_bfloat16(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)
