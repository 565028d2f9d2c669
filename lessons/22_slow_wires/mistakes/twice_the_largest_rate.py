# task 3: returns twice the largest rate, with which x grows.
from math import pi, sin

from solution import *  # noqa: F403


def largest_rate(curvature, delay):
    return 4 * sin(pi / (4 * delay - 2)) / curvature
