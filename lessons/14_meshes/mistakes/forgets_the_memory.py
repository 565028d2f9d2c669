# task 5: lists layouts that do not fit the memory.
import solution
from solution import *  # noqa: F403


def layouts_that_fit(ranks, cluster, *, memory, **model):
    return solution.layouts_that_fit(ranks, cluster, memory=1e30, **model)
