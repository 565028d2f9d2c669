# task 3: leaves a region by an all-reduce, but does not enter it: backward lacks the other ranks' part of the gradient.
import torch
from solution import *  # noqa: F403

from minidist.full.adjoint import reduce_from
from minidist.full.collectives import all_reduce


def train_step(blocks, x, targets, rate, dp, tp):
    weights = [weight.requires_grad_() for block in blocks for weight in block]
    for up, down in blocks:
        x = reduce_from(torch.relu(x @ up) @ down, tp)
    loss = (x - targets).square().mean() / dp.size
    gradients, total = torch.autograd.grad(loss, weights), loss.detach()
    all_reduce(total, dp)
    for weight, gradient in zip(weights, gradients, strict=True):
        whole = gradient.contiguous()
        all_reduce(whole, dp)
        weight.requires_grad_(False).sub_(rate * whole)
    return total
