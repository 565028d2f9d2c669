# task 3: multiplies the gradient in place, which belongs to the stage behind.
import solution
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    found = solution.backward_for_inputs(weights, activations, gradient)
    gradient.mul_(1 - activations[-1] ** 2)
    return found
