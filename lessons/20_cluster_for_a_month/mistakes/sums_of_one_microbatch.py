# task 2: holds gradients in 32 bits also where a replica has one microbatch.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    return found | {"gradients": 2 * found["parameters"]}
