# task 4: compares seconds, so a rank that has more rows seems slow.
import solution
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    return solution.straggler(seconds, [min(1, count) for count in rows], stages)
