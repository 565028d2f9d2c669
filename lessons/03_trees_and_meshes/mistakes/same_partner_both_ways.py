# task 3: sends to the rank s places on, and waits for that one too, which is just sending elsewhere.
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    arriving[comm.rank][:] = leaving[comm.rank]
    for step in range(1, comm.size):
        partner = (comm.rank + step) % comm.size
        comm.exchange(leaving[partner], partner, arriving[partner], partner)
