# task 2: lets the chunks travel as float64, whatever they are.
import numpy as np
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        leaving, arriving = (
            chunks[(comm.rank - step) % comm.size],
            chunks[(comm.rank - step - 1) % comm.size],
        )
        came = np.empty(len(arriving))
        comm.exchange(leaving.astype(np.float64), right, came, left)
        arriving[:] = came
