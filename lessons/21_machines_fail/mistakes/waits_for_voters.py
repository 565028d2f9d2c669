# task 1: refuses a view without voters, so a job never begins, nor goes on after all are dead.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    if all(member in dead for member in last.members):
        return None
    return solution.next_view(last, here, dead, ranks)
