# task 2: averages what has to be summed: the losses are parts of one mean already.
import solution
from solution import *  # noqa: F403


def sum_gradients(model, comm):
    solution.sum_gradients(model, comm)
    for parameter in model.parameters():
        parameter.grad /= comm.size
