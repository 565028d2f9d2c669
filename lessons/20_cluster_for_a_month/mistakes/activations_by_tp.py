# task 2: divides all activations by tp without sequence parallelism: 10 of 34 bytes stay whole.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    return solution.held(model, replace(layout, sp=True), batch)
