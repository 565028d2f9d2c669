# task 3: counts 32 bits for each block's scale, as if there were no double quantisation.
from solution import *  # noqa: F403


def bits_per_weight(count):
    return 8 * (-(-count // 2) + 4 * -(-count // 64)) / count
