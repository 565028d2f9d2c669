# task 4: does all forwards first: the right bubble, and all microbatches held. That is GPipe.
import solution
from solution import *  # noqa: F403


def one_forward_one_backward(rank, ranks, microbatches):
    return solution.gpipe(rank, ranks, microbatches)
