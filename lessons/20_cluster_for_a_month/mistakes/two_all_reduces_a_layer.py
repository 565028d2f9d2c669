# task 1: counts the all-reduces of the forward alone: the backward has two of its own.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"tensor": found["tensor"] / (3 if layout.recompute else 2)}
