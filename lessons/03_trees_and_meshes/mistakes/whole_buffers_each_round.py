# task 2: exchanges the whole buffer in each round: that is doubling without halving, log2 P times n bytes.
import numpy as np
from solution import *  # noqa: F403


def halving_doubling(buffer, comm):
    power = 1 << (comm.size.bit_length() - 1)
    arriving = np.empty_like(buffer)
    if comm.rank >= power:
        comm.send(buffer, comm.rank - power)
        comm.recv(buffer, comm.rank - power)
        return
    if comm.rank + power < comm.size:
        comm.recv(arriving, comm.rank + power)
        buffer += arriving
    distance = 1
    while distance < power:
        comm.exchange(buffer, comm.rank ^ distance, arriving, comm.rank ^ distance)
        buffer += arriving
        distance *= 2
    if comm.rank + power < comm.size:
        comm.send(buffer, comm.rank + power)
