# task 1: hides gradients behind the forward as well, when none is ready yet.
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found, m = (
        solution.step(model, machine, layout, batch),
        batch // (layout.dp * layout.microbatch),
    )
    held = 2 * model.parameters / (layout.tp * layout.pp)
    sent = solution.ring(
        held, layout.dp, solution.bandwidth(machine, layout.tp * layout.dp, layout.tp)
    )
    hides = (found["computing"] + found["recomputing"]) / m
    return found | {"data": max(0.0, sent - hides)}
