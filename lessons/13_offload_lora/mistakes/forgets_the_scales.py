# task 3: says four bits, and forgets that scales, steps and the mean are kept as well.
from solution import *  # noqa: F403


def bits_per_weight(count):
    return 8 * ((count + 1) // 2) / count
