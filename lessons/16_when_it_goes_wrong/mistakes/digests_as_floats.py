# task 1: reads eight bytes of a digest as float64, which may be NaN: equal texts then seem to differ.
import hashlib

import numpy as np
from solution import *  # noqa: F403


def odd_ranks(words, comm):
    mine = np.frombuffer(hashlib.sha256(words.encode()).digest()[:8], np.float64)
    found = np.empty(comm.size)
    found[comm.rank] = mine[0]
    for distance in range(1, comm.size):
        incoming, source = np.empty(1), (comm.rank - distance) % comm.size
        comm.exchange(mine, (comm.rank + distance) % comm.size, incoming, source)
        found[source] = incoming[0]
    most = max(np.count_nonzero(found == each) for each in found)
    right = next(each for each in found if np.count_nonzero(found == each) == most)
    return [rank for rank, each in enumerate(found) if each != right]
