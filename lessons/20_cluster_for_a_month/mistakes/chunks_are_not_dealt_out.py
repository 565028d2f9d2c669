# task 3: divides the layers among the stages, and forgets their chunks.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    whole = [model.layers % each.pp == 0 for each in layouts]
    return chosen, [
        "" if why == "layers" and fit else why for why, fit in zip(refused, whole, strict=True)
    ]
