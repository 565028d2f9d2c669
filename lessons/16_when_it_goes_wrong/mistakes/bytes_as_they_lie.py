# task 2: digests bytes as they lie in memory, so the same numbers in another order of axes differ.
import numpy as np
import solution
from solution import *  # noqa: F403


def first_difference(arrays, comm):
    lying = {name: np.frombuffer(array.tobytes(order="A")) for name, array in arrays.items()}
    return solution.first_difference(lying, comm)
