# task 1: multiplies the values of the new block by their weight in place: the next rank gets others.
import solution
from solution import *  # noqa: F403


def meet(query, output, lse, key, value, causal):
    solution.meet(query, output, lse, key, value, causal)
    value *= 0.5
