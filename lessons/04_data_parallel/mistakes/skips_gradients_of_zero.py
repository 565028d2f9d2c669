# task 2: skips gradients that are all 0, as on a rank without rows: the others wait for it.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_gradients(model, comm):
    for parameter in model.parameters():
        if parameter.grad.any():
            all_reduce(parameter.grad, comm, algorithm="ring")
