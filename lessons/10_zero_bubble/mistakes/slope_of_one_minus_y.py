# task 3: takes 1 - y for the derivative of tanh, which is 1 - y squared.
from solution import *  # noqa: F403


def backward_for_inputs(weights, activations, gradient):
    pairs = []
    for layer in reversed(range(len(weights))):
        before_tanh = gradient * (1 - activations[layer + 1])
        pairs.insert(0, (activations[layer], before_tanh))
        gradient = before_tanh @ weights[layer]
    return gradient, pairs
