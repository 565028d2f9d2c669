# task 3: takes tanh's slope at the input of a layer, behind its weight, and not at its output, before it.
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    pairs = []
    for weight, x in reversed(list(zip(weights, activations[:-1], strict=True))):
        pairs.insert(0, (x, gradient))
        gradient = gradient @ weight * (1 - x * x)
    return gradient, pairs
