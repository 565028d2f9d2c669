# task 1: subtracts what could hide even where less is sent, so a step gets shorter by sending.
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
    hides = (2 / 3 * found["computing"] + found["recomputing"]) / m
    return found | {"data": sent - hides}
