# task 2: the ranks beyond the power of two hand in their buffers, and are never told the sum.
import numpy as np
import solution
from solution import *  # noqa: F403


def halving_doubling(buffer, comm):
    power = 1 << (comm.size.bit_length() - 1)
    among = comm.split(comm.rank // power)
    if comm.rank >= power:
        comm.send(buffer, comm.rank - power)
        return
    if comm.rank + power < comm.size:
        arriving = np.empty_like(buffer)
        comm.recv(arriving, comm.rank + power)
        buffer += arriving
    solution.halving_doubling(buffer, among)
