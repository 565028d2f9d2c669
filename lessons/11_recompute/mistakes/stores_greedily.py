# task 4: stores each block as long as there is room for it, and recomputes the rest as one segment, which may not fit.
from solution import *  # noqa: F403


def fastest_plan(inputs, saved, seconds, budget):
    plan, room = [], budget
    for block, size in enumerate(saved):
        if size > room:
            return [*plan, tuple(range(block, len(saved)))]
        plan, room = [*plan, block], room - size
    return plan
