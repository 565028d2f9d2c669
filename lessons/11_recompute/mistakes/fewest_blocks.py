# task 4: recomputes the fewest blocks within the budget, whatever their seconds are.
import solution
from solution import *  # noqa: F403


def fastest_plan(inputs, saved, seconds, budget):
    return solution.fastest_plan(inputs, saved, [1.0] * len(seconds), budget)
