# task 3: lets a tensor that is not stored end in a KeyError.
import solution
from solution import *  # noqa: F403


def load(wanted, stored, read):
    return solution.load(wanted, {name: stored[name] for name in wanted}, read)
