# task 1: sends to the left neighbour and waits for the right one: the token goes round the other way.
from solution import *  # noqa: F403


def pass_token(own, comm):
    token = own.copy()
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.size > 1 and comm.rank == 0:
        comm.send(token, left)
        comm.recv(token, right)
    elif comm.size > 1:
        comm.recv(token, right)
        token += own
        comm.send(token, left)
    return token
