# task 3: passes whole buffers around: P - 1 messages as large as the buffer, P/2 times the bytes of the ring.
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = buffer.copy()
    for _ in range(comm.size - 1):
        arriving = buffer.copy()
        comm.exchange(leaving, right, arriving, left)
        buffer += arriving
        leaving = arriving
