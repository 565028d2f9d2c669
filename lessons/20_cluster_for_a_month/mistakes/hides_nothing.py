# task 1: hides no gradient behind a backward.
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    held = 2 * model.parameters / (layout.tp * layout.pp)
    sent = solution.ring(
        held, layout.dp, solution.bandwidth(machine, layout.tp * layout.dp, layout.tp)
    )
    return found | {"data": sent}
