# task 1: counts 6 N operations a token, and forgets those of attention.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    n, s = model.parameters, model.sequence
    without = 6 * n / (6 * n + 12 * model.layers * s * model.hidden)
    found = solution.step(model, machine, layout, batch)
    for part in ("computing", "recomputing"):
        found[part] *= without
    return found
