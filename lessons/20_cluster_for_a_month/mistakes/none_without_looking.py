# task 3: returns None, and refuses nothing: that none is best is no answer where nothing was refused.
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    return None, [""] * len(layouts)
