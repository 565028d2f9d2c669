# task 3: multiplies the gradient of the auxiliary loss by that of the weights, where it is 1.
import torch
from solution import *  # noqa: F403


class Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, loss, layer, counts):
        ctx.layer, ctx.counts = layer, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.tally = ctx.layer.tally + ctx.counts
        return gradient, gradient.sum(), None, None


def attach(weights, loss, layer, counts):
    return Attached.apply(weights, loss, layer, counts)
