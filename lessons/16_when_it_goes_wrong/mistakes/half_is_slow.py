# task 3: calls a rank slow that waits just half as long as the median, so also if nobody waits.
import numpy as np
import solution
from solution import *  # noqa: F403


def straggler(events):
    seconds = solution.waiting(events)
    least = min(seconds, key=lambda rank: (seconds[rank], rank))
    return least if seconds[least] <= np.median(list(seconds.values())) / 2 else None
