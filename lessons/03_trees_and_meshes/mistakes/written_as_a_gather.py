# task 3: every rank sends all others the chunk that it has for itself, as an all-gather does.
import numpy as np
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    own = leaving[comm.rank]
    arriving[comm.rank][:] = own
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(np.resize(own, len(leaving[to])), to, arriving[source], source)
