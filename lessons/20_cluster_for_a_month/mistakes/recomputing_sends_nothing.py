# task 1: forgets the two all-reduces of the forward that is computed again.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"tensor": found["tensor"] * (2 / 3 if layout.recompute else 1)}
