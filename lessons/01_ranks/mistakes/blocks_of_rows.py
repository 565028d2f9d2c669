# task 4: gives each worker a block of consecutive rows instead of every (P - 1)-th row.
import numpy as np
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    if comm.size == 1:
        return solution.farm(rows, shape, work, comm)
    blocks, results = np.array_split(np.arange(shape[0]), comm.size - 1), np.empty(shape)
    for turn in range(len(blocks[0])):
        now = [
            (worker, block[turn])
            for worker, block in enumerate(blocks, start=1)
            if turn < len(block)
        ]
        for worker, row in now:
            if comm.rank == 0:
                comm.send(rows[row], worker)
        for worker, row in now:
            if comm.rank == 0:
                comm.recv(results[row], worker)
            elif comm.rank == worker:
                comm.recv(results[row], 0)
                comm.send(work(results[row]), 0)
    return results if comm.rank == 0 else None
