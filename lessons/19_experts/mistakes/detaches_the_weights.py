# task 1: computes scores without gradients, as the choice has none: the router never learns.
import torch
from solution import *  # noqa: F403
from solution import route as right


def route(x, router, bias, k):
    with torch.no_grad():
        return right(x, router, bias, k)
