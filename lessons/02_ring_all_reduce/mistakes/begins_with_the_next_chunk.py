# task 2: begins the all-gather with chunk rank + 1, as if a rank owned that one.
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        leaving = chunks[(comm.rank + 1 - step) % comm.size].copy()
        arriving = chunks[(comm.rank - step) % comm.size]
        comm.exchange(leaving, right, arriving, left)
