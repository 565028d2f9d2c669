# task 3: takes the mean, as data parallelism does: the loss is one over all tokens, and its terms are to be added.
from solution import *  # noqa: F403
from solution import sum_partial_gradients as add_up


def sum_partial_gradients(gradients, comm):
    add_up(gradients, comm)
    for name in ("norm.weight", "down.bias"):
        gradients[name] /= comm.size
