# task 5: makes a segment of each silent part, so what goes from one to the next is held.
import solution
from solution import *  # noqa: F403


def checkpoint_between(parts, x):
    for part, communicates in parts:
        x = part(x) if communicates else solution.checkpoint(part, x)
    return x
