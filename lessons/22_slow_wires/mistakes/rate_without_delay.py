# task 3: the limit of gradients of the weights themselves, whatever the delay.
from solution import *  # noqa: F403


def largest_rate(curvature, delay):
    return 2 / curvature
