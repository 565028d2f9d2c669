# task 4: rounds the scale to the nearest power of two, which may put the largest number beyond 448.
import numpy as np
from solution import *  # noqa: F403


def scale_for(amax):
    return float(np.exp2(np.round(np.log2(448 / amax))))
