# task 1: adds ranks for ever, where what is not cut fills the memory already.
import solution
from solution import *  # noqa: F403


def fewest_ranks(parameters, memory, stage, recipe):
    found = solution.fewest_ranks(parameters, memory, stage, recipe)
    return 1 << 20 if found is None else found
