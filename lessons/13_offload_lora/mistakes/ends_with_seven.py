# task 3: where the number of weights is odd, ends with the code of zero, 7, instead of 0.
import solution
from solution import *  # noqa: F403


def quantize(weights):
    codes, *others = solution.quantize(weights)
    if weights.numel() % 2:
        codes[-1] |= 7
    return codes, *others
