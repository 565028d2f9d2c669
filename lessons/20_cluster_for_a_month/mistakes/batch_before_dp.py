# task 3: compares stages with the microbatches of the whole batch, before it is divided among replicas.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    few = [batch // each.microbatch < each.pp for each in layouts]
    return chosen, [
        "" if why == "stages" and not no else why for why, no in zip(refused, few, strict=True)
    ]
