# task 3: what a rank has for itself is not sent, and not copied either.
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(leaving[to], to, arriving[source], source)
