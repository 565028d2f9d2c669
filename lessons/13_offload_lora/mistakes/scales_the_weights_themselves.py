# task 3: divides the weights by their scales in place, on a view: the caller's weights are gone.
import solution
from solution import *  # noqa: F403


def quantize(weights):
    packed = solution.quantize(weights)
    flat = weights.view(-1)
    for start in range(0, len(flat), 64):
        flat[start : start + 64] /= flat[start : start + 64].abs().max().clamp(min=1e-30)
    return packed
