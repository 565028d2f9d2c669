# task 2: compares sums: numbers that change places, or whose sum stays, go unseen.
import numpy as np
from solution import *  # noqa: F403
from solution import from_all, odd_ones


def first_difference(arrays, comm):
    sums = [int(np.float64(array.sum()).view(np.int64)) for array in arrays.values()]
    if not odd_ones(from_all([int(np.sum(np.array(sums)))], comm)[:, 0].tolist()):
        return None
    table = from_all(sums, comm)
    odd = {name: odd_ones(table[:, column].tolist()) for column, name in enumerate(arrays)}
    return next(((name, ranks) for name, ranks in odd.items() if ranks), None)
