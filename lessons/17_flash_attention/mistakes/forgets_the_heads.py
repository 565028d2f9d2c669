# task 1: counts one matrix for each sequence, where each head has its own.
from solution import *  # noqa: F403


def matrix_bytes(batch, heads, queries, keys, itemsize):
    return batch * queries * keys * itemsize
