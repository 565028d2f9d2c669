# task 4: puts the results of worker 1 first, then those of worker 2: not in the order of the rows.
import numpy as np
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    results = solution.farm(rows, shape, work, comm)
    if results is None or comm.size == 1:
        return results
    return np.concatenate([results[worker :: comm.size - 1] for worker in range(comm.size - 1)])
