# task 3: what a rank has for itself becomes the very array of `leaving`: who writes into one changes the other.
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    arriving[comm.rank] = leaving[comm.rank]
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(leaving[to], to, arriving[source], source)
