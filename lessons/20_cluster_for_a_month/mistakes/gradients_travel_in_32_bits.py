# task 1: sends gradients in the 32 bits in which they are added up, not in 16.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    m = batch // (layout.dp * layout.microbatch)
    behind = (found["computing"] * 2 / 3 + found["recomputing"]) / m
    never = replace(machine, peak=machine.peak * 1e30)
    sent = solution.step(model, never, layout, batch)["data"]
    return found | {"data": max(0.0, 2 * sent - behind)}
