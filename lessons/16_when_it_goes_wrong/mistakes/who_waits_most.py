# task 3: blames the rank that waits most: that is one that the slow rank keeps waiting.
import solution
from solution import *  # noqa: F403


def straggler(events):
    seconds = solution.waiting(events)
    return max(sorted(seconds), key=seconds.__getitem__)
