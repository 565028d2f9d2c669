# task 3: the last rank of the chain sends as well, to the root, who never receives it.
import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    for piece in np.array_split(buffer, pieces):
        if comm.rank != root:
            comm.recv(piece, (comm.rank - 1) % comm.size)
        if comm.size > 1:
            comm.send(piece, (comm.rank + 1) % comm.size)
