# task 2: puts the arrays that came into the list and leaves the caller's, which were to be filled, empty.
import numpy as np
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        came = np.empty_like(chunks[(comm.rank - step - 1) % comm.size])
        comm.exchange(chunks[(comm.rank - step) % comm.size], right, came, left)
        chunks[(comm.rank - step - 1) % comm.size] = came
