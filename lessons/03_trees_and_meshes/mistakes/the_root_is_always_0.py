# task 1: numbers are not counted from the root, so rank 0's buffer goes round.
import solution
from solution import *  # noqa: F403


def tree_broadcast(buffer, root, comm):
    solution.tree_broadcast(buffer, 0, comm)
