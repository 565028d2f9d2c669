# task 1: sums into the caller's tensor, which backward of other operations may still need.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        total = x.detach()
        all_reduce(total, comm)
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def reduce_from(x, comm):
    return Leave.apply(x, comm)
