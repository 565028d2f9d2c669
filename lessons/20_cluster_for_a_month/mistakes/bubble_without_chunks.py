# task 1: forgets that v chunks make the bubble v times shorter.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    return found | {"bubble": found["bubble"] * layout.chunks}
