# task 3: has autograd find the weights' gradients, from a product that it does once more.
import torch
from solution import *  # noqa: F403


def backward_for_weights(pairs):
    weights = [
        torch.zeros(g.shape[1], x.shape[1], dtype=x.dtype, requires_grad=True) for x, g in pairs
    ]
    for weight, (x, gradient) in zip(weights, pairs, strict=True):
        torch.autograd.backward((x @ weight.T), gradient)
    return [weight.grad for weight in weights]
