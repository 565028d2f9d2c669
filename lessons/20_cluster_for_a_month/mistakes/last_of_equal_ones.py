# task 3: takes of layouts that are alike in all the last one; the first is wanted.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return chosen if chosen is None else max(
        i for i, each in enumerate(layouts) if each == layouts[chosen]
    ), refused
