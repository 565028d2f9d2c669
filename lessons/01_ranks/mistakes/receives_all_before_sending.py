# task 3: passes nothing on before the last piece is in: each rank of the chain waits for the whole buffer.
import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank != root:
        for piece in np.array_split(buffer, pieces):
            comm.recv(piece, left)
    if right != root:
        for piece in np.array_split(buffer, pieces):
            comm.send(piece, right)
