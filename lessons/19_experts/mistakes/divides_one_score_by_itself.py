# task 1: divides also a single score by its sum, which is itself: the weight is 1, and its gradient 0.
from solution import *  # noqa: F403
from solution import route as right


def route(x, router, bias, k):
    choice, weights = right(x, router, bias, k)
    return choice, weights / weights.sum(-1, keepdim=True)
