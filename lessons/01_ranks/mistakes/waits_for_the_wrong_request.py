# task 3: waits for the receive after the one it passes on, and for that of the first piece never.
import numpy as np
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = np.array_split(buffer, pieces)
    requests = [comm.irecv(part, left) for part in parts] if comm.rank != root else []
    for index, part in enumerate(parts):
        if requests:
            requests[min(index + 1, pieces - 1)].wait()
        if right != root:
            comm.send(part, right)
