# task 3: draws new numbers in the second run: the gradient is that of another dropout.
import solution
from solution import *  # noqa: F403


def checkpoint_random(block, x, generator):
    return solution.checkpoint(block, x)
