# task 2: reads digests as float64, one in a thousand of which is NaN: equal weights then seem to differ.
import hashlib

import numpy as np
from solution import *  # noqa: F403


def from_all(numbers, comm):
    mine = np.array(numbers)
    found = np.empty((comm.size, len(mine)))
    found[comm.rank] = mine
    for distance in range(1, comm.size):
        incoming, source = np.empty_like(mine), (comm.rank - distance) % comm.size
        comm.exchange(mine, (comm.rank + distance) % comm.size, incoming, source)
        found[source] = incoming
    return found


def odd_ones(answers):
    most = max(np.count_nonzero(answers == each) for each in answers)
    right = next(each for each in answers if np.count_nonzero(answers == each) == most)
    return [rank for rank, each in enumerate(answers) if each != right]


def digest(content):
    return np.frombuffer(hashlib.sha256(content).digest()[:8], np.float64)[0]


def first_difference(arrays, comm):
    digests = [digest(array.tobytes()) for array in arrays.values()]
    everything = digest(b"".join(array.tobytes() for array in arrays.values()))
    if not odd_ones(from_all([everything], comm)[:, 0]):
        return None
    table = from_all(digests, comm)
    odd = ((name, odd_ones(table[:, column])) for column, name in enumerate(arrays))
    return next(((name, ranks) for name, ranks in odd if ranks), None)
