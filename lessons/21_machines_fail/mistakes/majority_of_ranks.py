# task 1: wants a majority of the ranks of a whole view, so a job that has shrunk cannot go on.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    left = [member for member in last.members if member in here and member not in dead]
    if last.members and 2 * len(left) <= ranks:
        return None
    return solution.next_view(last, here, dead, ranks)
