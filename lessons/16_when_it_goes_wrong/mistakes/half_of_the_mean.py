# task 3: compares a rank with half of the mean, which the rank itself pulls down, not of the median.
import numpy as np
from solution import *  # noqa: F403
from solution import waiting


def straggler(events):
    waits = waiting(events)
    least = min(sorted(waits), key=lambda rank: waits[rank], default=None)
    return least if waits and waits[least] < np.mean(list(waits.values())) / 2 else None
