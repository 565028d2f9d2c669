# task 3: sends the buffer in one piece, so that only one rank of the chain works at a time.
import solution
from solution import *  # noqa: F403


def chain_broadcast(buffer, root, pieces, comm):
    solution.chain_broadcast(buffer, root, 1, comm)
