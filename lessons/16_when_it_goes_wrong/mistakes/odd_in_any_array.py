# task 2: names the ranks whose digest of everything is odd, not those whose first odd array is.
import solution
from solution import *  # noqa: F403


def first_difference(arrays, comm):
    found = solution.first_difference(arrays, comm)
    if found is None:
        return None
    name, ranks = found
    names = list(arrays)
    rest = {other: arrays[other] for other in names[names.index(name) + 1 :]}
    more = solution.first_difference(rest, comm) if rest else None
    return name, sorted({*ranks, *(more[1] if more else [])})
