# task 1: rounds the number of ranks down: on so many the model does not fit yet.
import solution
from solution import *  # noqa: F403


def fewest_ranks(parameters, memory, stage, recipe):
    found = solution.fewest_ranks(parameters, memory, stage, recipe)
    return found if found in (None, 1) else found - 1
