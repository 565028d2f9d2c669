# task 4: compares ranks of different stages, which have different layers.
import solution
from solution import *  # noqa: F403


def straggler(seconds, rows, stages):
    return solution.straggler(seconds, rows, [0] * len(rows))
