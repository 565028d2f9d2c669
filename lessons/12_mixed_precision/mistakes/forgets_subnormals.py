# task 4: goes on halving the step below 2^-6, where E4M3 has the multiples of 2^-9 and nothing finer.
import numpy as np
from solution import *  # noqa: F403


def quantize(x, scale):
    scaled = np.clip(x.astype(np.float64) * scale, -448, 448)
    step = np.exp2(np.frexp(scaled)[1] - 4.0)
    return (np.round(scaled / step) * step).astype(np.float32)
