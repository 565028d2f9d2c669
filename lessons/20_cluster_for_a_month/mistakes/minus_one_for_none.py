# task 3: returns -1 if all are refused; None is wanted.
import solution
from solution import *  # noqa: F403


def best(model, machine, layouts, batch):
    chosen, refused = solution.best(model, machine, layouts, batch)
    return -1 if chosen is None else chosen, refused
