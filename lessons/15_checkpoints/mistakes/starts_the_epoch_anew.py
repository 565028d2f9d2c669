# task 4: forgets the place in the text and begins the epoch again.
import solution
from solution import *  # noqa: F403


def restore(run, arrays, facts):
    solution.restore(run, arrays, {**facts, "position": 0})
