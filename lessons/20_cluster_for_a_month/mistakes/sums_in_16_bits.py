# task 2: adds up the gradients of several microbatches in 16 bits.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    return found | {"gradients": found["parameters"]}
