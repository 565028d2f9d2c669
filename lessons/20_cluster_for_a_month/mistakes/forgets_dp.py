# task 1: computes m from the batch without dividing it among the replicas.

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    return solution.step(model, machine, layout, batch * layout.dp)
