# task 1: sends to number + distance although there may be no such rank.
from solution import *  # noqa: F403


def tree_broadcast(buffer, root, comm):
    number, distance = (comm.rank - root) % comm.size, 1
    while distance < comm.size:
        if number < distance:
            comm.send(buffer, (number + distance + root) % comm.size)
        elif number < 2 * distance:
            comm.recv(buffer, (number - distance + root) % comm.size)
        distance *= 2
