# task 2: counts momentum and variance, and forgets the master copy of the weights.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    return found | {"optimizer": found["optimizer"] * 8 / 12}
