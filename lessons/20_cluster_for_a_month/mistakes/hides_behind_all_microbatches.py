# task 1: hides gradients behind the backward of all microbatches: they are complete in the last one only.
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    held = 2 * model.parameters / (layout.tp * layout.pp)
    sent = solution.ring(
        held, layout.dp, solution.bandwidth(machine, layout.tp * layout.dp, layout.tp)
    )
    hides = 2 / 3 * found["computing"] + found["recomputing"]
    return found | {"data": max(0.0, sent - hides)}
