# task 2: sends the arrays to all ranks, as a broadcast would, needy or not.
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    newest = max(done for done, _ in held)
    source = [done for done, _ in held].index(newest)
    if newest >= 0 and mine.done + 1 == newest and mine.ready:
        take_step()
    for rank in range(comm.size * (newest >= 0)):
        for array in arrays.values():
            if rank != source and comm.rank == source:
                comm.send(array, to=rank)
            elif rank != source and comm.rank == rank:
                comm.recv(array, source=source)
    return newest
