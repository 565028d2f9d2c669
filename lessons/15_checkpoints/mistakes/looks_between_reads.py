# task 3: looks at one tensor after the other between the reads, so some are read before the error.
import solution
from solution import *  # noqa: F403


def load(wanted, stored, read):
    found = {}
    for name, want in wanted.items():
        found |= solution.load({name: want}, stored, read)
    return found
