# task 1: takes the root of the budget, as if query, key and value were not held besides.
from math import isqrt

import solution
from solution import *  # noqa: F403


def longest_sequences(budget, batch, heads, kv_heads, head_size, itemsize):
    second = solution.longest_sequences(budget, batch, heads, kv_heads, head_size, itemsize)[1]
    return isqrt(budget // (batch * heads * itemsize)), second
