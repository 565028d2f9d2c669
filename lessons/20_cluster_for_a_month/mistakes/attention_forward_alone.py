# task 1: counts 4 L s h operations of attention for a token, those of its forward, and not 12.
import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    n, s = model.parameters, model.sequence
    attention = model.layers * s * model.hidden
    found = solution.step(model, machine, layout, batch)
    for part in ("computing", "recomputing"):
        found[part] *= (6 * n + 4 * attention) / (6 * n + 12 * attention)
    return found
