# task 1: sends to its nearest child first, so that the one with the largest subtree waits longest.
from solution import *  # noqa: F403


def tree_broadcast(buffer, root, comm):
    number, distance = (comm.rank - root) % comm.size, 1
    if number:
        comm.recv(buffer, (comm.rank - (number & -number)) % comm.size)
    while distance < comm.size and number % (2 * distance) == 0:
        if number + distance < comm.size:
            comm.send(buffer, (comm.rank + distance) % comm.size)
        distance *= 2
