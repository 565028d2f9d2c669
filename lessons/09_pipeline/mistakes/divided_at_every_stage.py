# task 5: every stage divides the gradient that comes by the microbatches, which the loss has done already.
import solution
import torch
from solution import *  # noqa: F403
from torch import nn


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.count, None


class Stage(nn.Module):
    def __init__(self, stage, count):
        super().__init__()
        self.stage, self.count = stage, count

    def forward(self, x):
        return Divided.apply(self.stage(x), self.count)


def run_step(words, stage, loss, inputs, targets, comm):
    if comm.rank < comm.size - 1:
        stage = Stage(stage, len(inputs))
    return solution.run_step(words, stage, loss, inputs, targets, comm)
