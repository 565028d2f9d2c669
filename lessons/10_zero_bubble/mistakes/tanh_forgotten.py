# task 3: takes the gradient of what tanh gave for the gradient of what it was applied to.
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    pairs = []
    for weight, x in zip(reversed(weights), reversed(activations[:-1]), strict=True):
        pairs.insert(0, (x, gradient))
        gradient = gradient @ weight
    return gradient, pairs
