# task 1: multiplies the ideal time by (p - 1)/(v m + p - 1), which is the share of the whole step.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    m, v, p = batch // (layout.dp * layout.microbatch), layout.chunks, layout.pp
    ideal = found["computing"] + found["recomputing"] + found["tensor"]
    return found | {"bubble": ideal * (p - 1) / (v * m + p - 1)}
