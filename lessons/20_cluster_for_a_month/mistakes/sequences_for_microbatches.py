# task 1: takes each sequence for a microbatch, whatever the size of one.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"bubble": found["bubble"] / layout.microbatch}
