# task 5: recomputes all parts as one segment: the all-reduces of forward are sent a second time.
import solution
from solution import *  # noqa: F403
from torch import nn


def checkpoint_between(parts, x):
    return solution.checkpoint(nn.Sequential(*(part for part, _ in parts)), x)
