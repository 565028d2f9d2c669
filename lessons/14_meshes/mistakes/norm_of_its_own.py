# task 4: clips by the norm of what this rank holds: each rank scales by another factor.
import math

from solution import *  # noqa: F403


def clip(gradients, limit, tp, pp):
    norm = math.sqrt(sum(float((one.values**2).sum()) for one in gradients))
    for one in gradients:
        one.values *= min(1.0, limit / (norm + 1e-6))
    return norm
