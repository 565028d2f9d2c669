# task 3: reads the weights in float64, twice the bytes of float32.
import solution
from solution import *  # noqa: F403


def dequantize(packed, shape):
    return solution.dequantize(packed, shape).double()
