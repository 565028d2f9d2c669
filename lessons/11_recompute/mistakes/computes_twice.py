# task 2: runs the block again for each of the gradients it returns: one second forward too many.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        def gradient_of(place):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            wanted = (x, *ctx.parameters)[place]
            if not wanted.requires_grad:
                return None
            with torch.enable_grad():
                return torch.autograd.grad(ctx.block(x), wanted, gradient)[0]

        return None, *(gradient_of(place) for place in range(1 + len(ctx.parameters)))


def checkpoint(block, x):
    return Again.apply(block, x, *block.parameters()) if torch.is_grad_enabled() else block(x)
