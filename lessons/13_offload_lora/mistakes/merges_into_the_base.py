# task 1: merges in place: the layer that the next adapter should find unchanged has this one in it.
import solution
from solution import *  # noqa: F403


def merge(adapted):
    merged = solution.merge(adapted)
    adapted.base.weight.data.copy_(merged.weight)
    return merged
