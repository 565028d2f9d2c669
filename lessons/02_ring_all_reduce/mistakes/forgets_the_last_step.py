# task 2: takes P - 2 steps, so the right neighbour's chunk never comes round.
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 2):
        comm.exchange(
            chunks[(comm.rank - step) % comm.size],
            right,
            chunks[(comm.rank - step - 1) % comm.size],
            left,
        )
