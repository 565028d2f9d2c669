# task 3: the chain begins at rank 0, whichever rank is the root.
import solution
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    solution.chain_broadcast(buffer, 0, pieces, comm)
