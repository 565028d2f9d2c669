# task 3: computes the weights' gradients in the first half and hands them over: nothing is left to fill a bubble with.
import solution
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    gradient, pairs = solution.backward_for_inputs(weights, activations, gradient)
    return gradient, [(g.T @ x, g) for x, g in pairs]


def backward_for_weights(pairs):
    return [product for product, _ in pairs]
