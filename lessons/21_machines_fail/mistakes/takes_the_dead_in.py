# task 1: takes members into the view of whom the launcher knows that they have ended.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    dead = set(dead)
    if solution.next_view(last, here, dead, ranks) is None:
        return None
    left = [member for member in last.members if member in here]
    new = sorted(member for member in here if member not in last.members)
    return solution.View(last.number + 1, tuple([*left, *new][:ranks]))
