# task 2: with P no power of two the ranks from Q on hand in at Q - 1, Q - 2, ... instead of at rank - Q.
import numpy as np
from solution import *  # noqa: F403

from minidist.full.collectives import recursive


def halving_doubling(buffer, comm):
    power = recursive.power_below(comm.size)
    partner = 2 * power - 1 - comm.rank
    if comm.rank >= power:
        comm.send(buffer, partner)
        comm.recv(buffer, partner)
        return
    arriving, ends = np.empty_like(buffer), [0]
    if partner < comm.size:
        comm.recv(arriving, partner)
        buffer += arriving
    for chunk in np.array_split(buffer, power):
        ends.append(ends[-1] + len(chunk))
    recursive._halve(buffer, ends, power, comm, np.add)
    recursive._double(buffer, ends, power, comm)
    if partner < comm.size:
        comm.send(buffer, partner)
