# task 2: divides the optimizer state by tp and pp once more when ZeRO-1 shards it.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    again = layout.tp * layout.pp if layout.zero else 1
    return found | {"optimizer": found["optimizer"] / again}
