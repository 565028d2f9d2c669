# task 4: rounds the results to float32, of which seven digits are left.
import numpy as np
import solution
from solution import *  # noqa: F403


def farm(rows, shape, work, comm):
    results = solution.farm(rows, shape, work, comm)
    return None if results is None else results.astype(np.float32)
