# task 1: backward of f sums into the gradient that it was given, which other branches of the graph may still need.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()  # a copy only if it has to be
        all_reduce(gradient, ctx.comm)
        return gradient, None


def copy_to(x, comm):
    return Enter.apply(x, comm)
