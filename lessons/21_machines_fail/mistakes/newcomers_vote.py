# task 1: counts newcomers as votes for the last view.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    voters = [member for member in last.members if member not in dead]
    if 2 * len([member for member in here if member not in dead]) > len(voters):
        dead = {*dead, *last.members} - set(here) | set(dead)
    return solution.next_view(last, here, dead, ranks)
