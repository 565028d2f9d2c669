# task 4: the master sends all rows before it receives; a worker that wants to hand in its first result waits for ever.
import numpy as np
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    if comm.rank > 0 or comm.size == 1:
        return solution.farm(rows, shape, work, comm)
    results, workers = np.empty(shape), comm.size - 1
    for i, row in enumerate(rows):
        comm.send(row, 1 + i % workers)
    for i in range(len(rows)):
        comm.recv(results[i], 1 + i % workers)
    return results
