# task 3: passes pieces on by isend and never waits: the caller gets its buffer back while it is still being read.
import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for piece in np.array_split(buffer, pieces):
        if comm.rank != root:
            comm.recv(piece, left)
        if right != root:
            comm.isend(piece, right)
