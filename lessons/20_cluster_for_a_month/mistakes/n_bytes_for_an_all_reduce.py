# task 1: lets an all-reduce of n bytes send n bytes; a ring sends 2 (P - 1)/P n.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    tp = layout.tp
    return found | {"tensor": found["tensor"] / (2 * (tp - 1) / tp) if tp > 1 else 0.0}
