# task 1: takes the largest bfloat16 for what rounds up beyond it, which is to become infinity.
import numpy as np
import solution
from solution import *  # noqa: F403


def to_bfloat16(x):
    bits = solution.to_bfloat16(x)
    grown = np.isfinite(x) & (bits & 0x7FFF == 0x7F80)
    return np.where(grown, bits - 1, bits).astype(np.uint16)
