# task 2: divides by the number of ranks.
import solution
from solution import *  # noqa: F403


def reduce_adapters(model, comm):
    solution.reduce_adapters(model, comm)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= comm.size
