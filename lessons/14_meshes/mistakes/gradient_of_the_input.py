# task 3: asks for the gradient of the first block's input, too, and pays an all-reduce for what nobody needs.
import torch
from solution import *  # noqa: F403

from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.collectives import all_reduce


def train_step(blocks, x, targets, rate, dp, tp):
    weights = [weight.requires_grad_() for block in blocks for weight in block]
    inputs = x = x.clone().requires_grad_()
    for up, down in blocks:
        x = reduce_from(torch.relu(copy_to(x, tp) @ up) @ down, tp)
    loss = (x - targets).square().mean() / dp.size
    gradients, total = torch.autograd.grad(loss, [*weights, inputs])[:-1], loss.detach()
    all_reduce(total, dp)
    for weight, gradient in zip(weights, gradients, strict=True):
        whole = gradient.contiguous()
        all_reduce(whole, dp)
        weight.requires_grad_(False).sub_(rate * whole)
    return total
