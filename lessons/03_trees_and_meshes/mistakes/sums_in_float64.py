# task 2: adds up a float64 copy and copies it back, whatever the buffer is.
import numpy as np
import solution
from solution import *  # noqa: F403


def halving_doubling(buffer, comm):
    whole = buffer.astype(np.float64)
    solution.halving_doubling(whole, comm)
    buffer[:] = whole
