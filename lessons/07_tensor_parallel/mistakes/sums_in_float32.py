# task 1: rounds what comes out to float32, whatever the model computes in.
import solution
from solution import *  # noqa: F403


def reduce_from(x, comm):
    return solution.reduce_from(x, comm).float()
