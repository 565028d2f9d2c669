# task 3: leaves the pairs in the order in which backward came by, from the last layer to the first.
import solution
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    gradient, pairs = solution.backward_for_inputs(weights, activations, gradient)
    return gradient, pairs[::-1]
