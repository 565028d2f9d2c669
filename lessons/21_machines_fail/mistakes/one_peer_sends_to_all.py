# task 2: has the first rank that holds the arrays send to all needy ones, while its peers wait.
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    newest = max(done for done, _ in held)
    has = [rank for rank, (done, ready) in enumerate(held) if newest in (done, done + ready)]
    if mine.done < newest and comm.rank in has:
        take_step()
    needy = [rank for rank in range(comm.size) if rank not in has]
    for rank in needy if newest >= 0 else []:
        source = has[0]
        for array in arrays.values():
            if comm.rank == source:
                comm.send(array, to=rank)
            elif comm.rank == rank:
                comm.recv(array, source=source)
    return newest
