# task 3: sets the tally to the counts of the last backward: a step has several microbatches.
import torch
from solution import *  # noqa: F403


class Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, loss, layer, counts):
        ctx.layer, ctx.counts = layer, counts
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.tally = ctx.counts
        return gradient, torch.tensor(1.0).double(), None, None


def attach(weights, loss, layer, counts):
    return Attached.apply(weights, loss, layer, counts)
