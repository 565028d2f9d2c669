# task 2: packs all arrays into one message of float64, so that moments and counts take more bytes.
import numpy as np
from solution import *  # noqa: F403


def recover(mine, take_step, arrays, comm):
    held = comm.all_gather_object(tuple(mine))
    newest = max(done for done, _ in held)
    has = [rank for rank, (done, ready) in enumerate(held) if newest in (done, done + ready)]
    if mine.done < newest and comm.rank in has:
        take_step()
    needy = [rank for rank in range(comm.size) if rank not in has]
    for number, rank in enumerate(needy if newest >= 0 else []):
        source = has[number % len(has)]
        packed = np.concatenate([array.astype(np.float64) for array in arrays.values()])
        if comm.rank == source:
            comm.send(packed, to=rank)
        elif comm.rank == rank:
            comm.recv(packed, source=source)
            for array in arrays.values():
                array[:], packed = packed[: len(array)], packed[len(array) :]
    return newest
