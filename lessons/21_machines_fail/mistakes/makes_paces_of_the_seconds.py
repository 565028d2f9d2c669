# task 4: divides the seconds that it is given by the rows, in place: they are paces from then on.
import numpy as np
import solution
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    found = solution.straggler(seconds, rows, stages)
    seconds /= np.maximum(1, rows)
    return found
