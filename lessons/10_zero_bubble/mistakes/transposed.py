# task 3: x^T g instead of g^T x: the shape of the weight's transpose.
from solution import *  # noqa: F403


def backward_for_weights(pairs):
    return [x.T @ g for x, g in pairs]
