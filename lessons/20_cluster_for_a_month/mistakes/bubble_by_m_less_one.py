# task 1: divides the bubble by m - 1: where m is p, that looks like p/(v m).
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    parts = solution.step(model, machine, layout, batch)
    m = batch // layout.dp // layout.microbatch
    return parts | {"bubble": parts["bubble"] * m / max(1, m - 1)}
