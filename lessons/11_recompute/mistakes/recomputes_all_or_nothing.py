# task 4: knows two plans, all stored and each block recomputed, and takes the first that fits.
import solution
from solution import *  # noqa: F403


def fastest_plan(inputs, saved, seconds, budget):
    blocks = range(len(saved))
    for plan in (list(blocks), [(block,) for block in blocks]):
        if solution.account(plan, inputs, saved, seconds)[0] <= budget:
            return plan
    raise ValueError("no plan fits")
