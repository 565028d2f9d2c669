# task 5: multiplies the mean time between failures by the number of ranks: more ranks fail more often, not less.
from math import sqrt

from solution import *  # noqa: F403


def interval(write_seconds, mtbf_seconds, ranks):
    return sqrt(2 * write_seconds * mtbf_seconds * ranks)
