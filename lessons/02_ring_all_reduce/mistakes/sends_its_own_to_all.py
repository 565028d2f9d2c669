# task 2: sends its own chunk to every rank: as many bytes, but across the whole machine instead of one link.
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[comm.rank], to, chunks[source], source)
