# task 2: runs the first forward with gradients and keeps its graph: nothing is saved by computing it again.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.enable_grad():
            ctx.first = block(x.detach().requires_grad_())
        return ctx.first.detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        wanted = [tensor for tensor in (x, *ctx.parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        return (
            None,
            next(found),
            *(next(found) if p.requires_grad else None for p in ctx.parameters),
        )


def checkpoint(block, x):
    return Again.apply(block, x, *block.parameters()) if torch.is_grad_enabled() else block(x)
