# task 2: sends the digests of all arrays in every step, also while nothing is wrong.
from solution import *  # noqa: F403
from solution import digest, from_all, odd_ones


def first_difference(arrays, comm):
    table = from_all([digest(array.tobytes()) for array in arrays.values()], comm)
    odd = {name: odd_ones(table[:, column].tolist()) for column, name in enumerate(arrays)}
    return next(((name, ranks) for name, ranks in odd.items() if ranks), None)
