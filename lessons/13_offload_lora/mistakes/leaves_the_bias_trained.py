# task 1: freezes the weight and forgets the bias.
import solution
from solution import *  # noqa: F403


def adapt(linear, rank, alpha, generator):
    adapted = solution.adapt(linear, rank, alpha, generator)
    linear.bias.requires_grad_()
    return adapted
