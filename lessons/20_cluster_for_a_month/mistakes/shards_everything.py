# task 2: shards parameters and gradients, too, which is ZeRO-3.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    ranks = layout.dp if layout.zero else 1
    return found | {name: found[name] / ranks for name in ("parameters", "gradients")}
