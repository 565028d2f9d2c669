# task 1: scales by alpha instead of alpha/rank, so another rank needs another learning rate.
import solution
from solution import *  # noqa: F403


def adapt(linear, rank, alpha, generator):
    return solution.adapt(linear, rank, alpha * rank, generator)
