# task 3: chunks travel as float64, whatever they are.
import numpy as np
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    arriving[comm.rank][:] = leaving[comm.rank]
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        came = np.empty(len(arriving[source]))
        comm.exchange(leaving[to].astype(np.float64), to, came, source)
        arriving[source][:] = came
