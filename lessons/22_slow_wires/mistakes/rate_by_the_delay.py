# task 3: divides the limit by the delay.
from solution import *  # noqa: F403


def largest_rate(curvature, delay):
    return 2 / (curvature * delay)
