# task 2: every rank sends before it receives: all wait for each other. (Small messages hide it under mpirun.)
from solution import *  # noqa: F403


def ring_all_gather(chunks, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        comm.send(chunks[(comm.rank - step) % comm.size], right)
        comm.recv(chunks[(comm.rank - step - 1) % comm.size], left)
