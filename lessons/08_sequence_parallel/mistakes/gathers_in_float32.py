# task 1: rounds what comes out to float32, whatever the model computes in.
import solution
from solution import *  # noqa: F403


def gather_tokens(x, comm):
    return solution.gather_tokens(x, comm).float()
