# task 3: cuts equal pieces, and the last one takes what is left, instead of numpy.array_split's.
import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for piece in np.split(buffer, [len(buffer) // pieces * i for i in range(1, pieces)]):
        if comm.rank != root:
            comm.recv(piece, left)
        if right != root:
            comm.send(piece, right)
