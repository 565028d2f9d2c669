# task 1: the buffer travels as float64, whatever it is: int64 loses its last digits, float32 takes twice the bytes.
import numpy as np
import solution
from solution import *  # noqa: F403


def tree_broadcast(buffer, root, comm):
    whole = buffer.astype(np.float64)
    solution.tree_broadcast(whole, root, comm)
    buffer[:] = whole
