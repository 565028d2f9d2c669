# task 1: passes the buffer from neighbour to neighbour: P - 1 rounds.
from solution import *  # noqa: F403


def tree_broadcast(buffer, root, comm):
    if comm.rank != root:
        comm.recv(buffer, (comm.rank - 1) % comm.size)
    if (comm.rank + 1) % comm.size != root:
        comm.send(buffer, (comm.rank + 1) % comm.size)
