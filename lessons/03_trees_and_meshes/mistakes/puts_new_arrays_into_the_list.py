# task 3: puts the arrays that came into the list `arriving` and leaves the caller's empty.
import numpy as np
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    arriving[comm.rank][:] = leaving[comm.rank]
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        came = np.empty_like(arriving[source])
        comm.exchange(leaving[to], to, came, source)
        arriving[source] = came
