# task 1: never asks for a majority: two halves that are cut apart both go on.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    here = [member for member in here if member not in dead]
    return solution.next_view(last, here, set(last.members) - set(here), ranks)
