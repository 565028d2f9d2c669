# task 2: hands only x to autograd: where x needs no gradient, backward is never called (torch's reentrant variant).
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
        torch.autograd.backward(y, gradient)
        return None, x.grad


def checkpoint(block, x):
    return Again.apply(block, x) if torch.is_grad_enabled() else block(x)
