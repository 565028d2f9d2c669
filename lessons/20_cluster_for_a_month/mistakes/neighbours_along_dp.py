# task 1: takes dp ranks for neighbours, so that their ring stays in a node; tp ranks lie between them.
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found, m = (
        solution.step(model, machine, layout, batch),
        batch // (layout.dp * layout.microbatch),
    )
    held = 2 * model.parameters / (layout.tp * layout.pp)
    sent = solution.ring(held, layout.dp, solution.bandwidth(machine, layout.dp, 1))
    hides = (2 / 3 * found["computing"] + found["recomputing"]) / m
    return found | {"data": max(0.0, sent - hides)}
