# task 2: lets only those serve who had taken the step before.
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    newest = max(done for done, _ in held)
    first = [rank for rank, (done, _) in enumerate(held) if done == newest]
    has = [rank for rank, (done, ready) in enumerate(held) if newest in (done, done + ready)]
    if mine.done < newest and comm.rank in has:
        take_step()
    needy = [rank for rank in range(comm.size) if rank not in has]
    for number, rank in enumerate(needy if newest >= 0 else []):
        source = first[number % len(first)]
        for array in arrays.values():
            if comm.rank == source:
                comm.send(array, to=rank)
            elif comm.rank == rank:
                comm.recv(array, source=source)
    return newest
