# task 1: refuses half of the voters also with the lowest of them: after a fair cut nobody goes on.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    voters = [member for member in last.members if member not in dead]
    if voters and 2 * len([member for member in voters if member in here]) == len(voters):
        return None
    return solution.next_view(last, here, dead, ranks)
