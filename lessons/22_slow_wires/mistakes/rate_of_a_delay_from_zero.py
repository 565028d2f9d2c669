# task 3: counts the delay from 0.
from math import pi, sin

from solution import *  # noqa: F403


def largest_rate(curvature, delay):
    return 2 * sin(pi / (4 * delay + 2)) / curvature
