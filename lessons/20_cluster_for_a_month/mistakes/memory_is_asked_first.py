# task 3: names memory as the reason before it looks whether the layout is possible.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    enough = [max(batch, each.dp * each.microbatch) for each in layouts]
    bytes = [solution.held(model, each, many) for each, many in zip(layouts, enough, strict=True)]
    large = [not solution.fits(machine, each) for each in bytes]
    return chosen, [
        "memory" if much and why else why for why, much in zip(refused, large, strict=True)
    ]
