# task 1: rounds every tie away from zero, so sums of many rounded numbers drift.
import numpy as np
from solution import *  # noqa: F403


def to_bfloat16(x):
    bits = (x.view(np.uint32).astype(np.uint64) + 0x8000) >> 16
    return np.where(np.isnan(x), 0x7FC0, bits).astype(np.uint16)
