# task 2: averages the parameters instead of summing the gradients, which stay as different as they were.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_gradients(model, comm):
    for parameter in model.parameters():
        all_reduce(parameter.detach(), comm, op="mean", algorithm="ring")
