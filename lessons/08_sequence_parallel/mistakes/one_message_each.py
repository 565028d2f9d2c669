# task 3: reduces every parameter by itself: a model with a hundred norms then waits for a hundred small messages.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_partial_gradients(gradients, comm):
    for name in ("norm.weight", "down.bias"):
        all_reduce(gradients[name], comm)
