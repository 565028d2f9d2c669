# task 1: sends along tp for all layers of the model; a stage has 1/pp of them.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"tensor": found["tensor"] * layout.pp}
