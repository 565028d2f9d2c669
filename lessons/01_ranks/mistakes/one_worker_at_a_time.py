# task 4: the master waits for each result before it sends the next row: the other workers stand idle.
import numpy as np
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    if comm.rank > 0 or comm.size == 1:
        return solution.farm(rows, shape, work, comm)
    results, workers = np.empty(shape), comm.size - 1
    for i, row in enumerate(rows):
        comm.send(row, 1 + i % workers)
        comm.recv(results[i], 1 + i % workers)
    return results
