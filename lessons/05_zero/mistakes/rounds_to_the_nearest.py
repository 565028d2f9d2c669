# task 1: rounds to the nearest number of parameters, which may be one too many.
import solution
from solution import *  # noqa: F403


def largest_model(memory, ranks, stage, recipe):
    each = solution.equation.model_states(1, ranks, stage, solution.EACH[recipe]).total
    return round(memory / each)
