# task 1: lets an all-reduce send (P - 1)/P n bytes, which is the reduce-scatter alone.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"tensor": found["tensor"] / 2}
