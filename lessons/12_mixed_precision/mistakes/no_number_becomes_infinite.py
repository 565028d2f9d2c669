# task 1: adds half to whatever comes, so a NaN of which only low bits tell becomes infinite, and others wrap around.
import numpy as np
from solution import *  # noqa: F403


def to_bfloat16(x):
    bits = x.view(np.uint32)
    return ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
