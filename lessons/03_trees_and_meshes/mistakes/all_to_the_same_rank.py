# task 3: everybody sends to rank 0 first, then to rank 1, ...: all to the same rank at once, whose port is the queue.
from solution import *  # noqa: F403


def all_to_all(leaving, arriving, comm):
    arriving[comm.rank][:] = leaving[comm.rank]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [comm.irecv(arriving[rank], rank) for rank in others]
    requests += [comm.isend(leaving[rank], rank) for rank in others]
    for request in requests:
        request.wait()
