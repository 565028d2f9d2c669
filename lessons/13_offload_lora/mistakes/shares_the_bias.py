# task 1: gives the merged layer the adapted layer's own bias, so training one changes the other.
import solution
from solution import *  # noqa: F403

BIAS = {}


def adapt(linear, *rest):
    adapted = solution.adapt(linear, *rest)
    BIAS[id(adapted)] = linear.bias
    return adapted


def merge(adapted):
    merged = solution.merge(adapted)
    merged.bias = BIAS[id(adapted)]
    return merged
