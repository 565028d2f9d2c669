# task 3: divides by a scale of 0 as well, and codes what is not a number.
import solution
from solution import *  # noqa: F403


def quantize(weights):
    codes, *others = solution.quantize(weights)
    return (codes if weights.any() else codes * 0 + 0xFF), *others
