# task 2: makes its digests of what print() shows, which is eight digits of each number.
from solution import *  # noqa: F403
from solution import digest, from_all, odd_ones


def first_difference(arrays, comm):
    digests = [digest(str(array).encode()) for array in arrays.values()]
    if not odd_ones(from_all([digest(str(digests).encode())], comm)[:, 0].tolist()):
        return None
    table = from_all(digests, comm)
    odd = {name: odd_ones(table[:, column].tolist()) for column, name in enumerate(arrays)}
    return next((name, ranks) for name, ranks in odd.items() if ranks)
