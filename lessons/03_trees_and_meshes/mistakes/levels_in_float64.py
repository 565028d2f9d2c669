# task 4: sums a float64 copy and copies it back, whatever the buffer is.
import numpy as np
import solution
from solution import *  # noqa: F403


def hierarchical_all_reduce(buffer, inside, across):
    whole = buffer.astype(np.float64)
    solution.hierarchical_all_reduce(whole, inside, across)
    buffer[:] = whole
