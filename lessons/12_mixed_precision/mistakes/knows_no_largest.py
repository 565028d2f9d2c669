# task 4: does not stop at 448: goes on with numbers that no eight bits stand for.
import numpy as np
from solution import *  # noqa: F403


def quantize(x, scale):
    scaled = x.astype(np.float64) * scale
    step = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, -6) - 3.0)
    return (np.round(scaled / step) * step).astype(np.float32)
