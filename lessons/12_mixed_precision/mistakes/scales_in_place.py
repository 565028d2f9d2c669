# task 4: multiplies x itself by the scale, and the caller has another x afterwards.
import solution
from solution import *  # noqa: F403


def quantize(x, scale):
    x *= scale
    return solution.quantize(x, 1.0)
