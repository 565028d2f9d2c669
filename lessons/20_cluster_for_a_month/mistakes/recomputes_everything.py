# task 1: counts forward and backward again for recomputing; it is the forward alone, a third.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"recomputing": 3 * found["recomputing"]}
