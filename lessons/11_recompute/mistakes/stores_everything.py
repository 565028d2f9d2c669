# task 2: calls the block and leaves all that autograd has saved: nothing is computed again.
from solution import *  # noqa: F403


def checkpoint(block, x):
    return block(x)
