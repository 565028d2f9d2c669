# task 3: names a slow rank in every run, also where all are equally fast.
import solution
from solution import *  # noqa: F403


def straggler(events):
    seconds = solution.waiting(events)
    return min(sorted(seconds), key=seconds.__getitem__)
