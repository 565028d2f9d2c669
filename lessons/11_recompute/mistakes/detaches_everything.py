# task 2: gives autograd the input only, so no parameter gets a gradient.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, torch.autograd.grad(y, x, gradient)[0]


def checkpoint(block, x):
    return Again.apply(block, x) if torch.is_grad_enabled() else block(x)
