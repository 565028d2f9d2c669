# task 2: leaves the optimizer state whole with ZeRO-1.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    return solution.held(model, replace(layout, zero=0), batch)
