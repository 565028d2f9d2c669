# task 3: leaves the curvature out.
from math import pi, sin

from solution import *  # noqa: F403


def largest_rate(curvature, delay):
    return 2 * sin(pi / (4 * delay - 2))
