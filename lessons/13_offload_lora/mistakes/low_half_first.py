# task 3: puts the earlier weight into the low four bits, so neighbours are exchanged when they are read.
import solution
from solution import *  # noqa: F403


def swapped(codes):
    return codes >> 4 | codes << 4


def quantize(weights):
    codes, *others = solution.quantize(weights)
    return swapped(codes), *others


def dequantize(packed, shape):
    codes, *others = packed
    return solution.dequantize((swapped(codes), *others), shape)
