# task 2: hangs the result onto ctx, so it stays after backward.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        ctx.y = block(x)
        return ctx.y.view_as(ctx.y)

    @staticmethod
    def backward(ctx, gradient):
        kept, *parameters = ctx.saved_tensors
        x = kept.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            y = ctx.block(x)
        wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        return None, *(next(found) if tensor.requires_grad else None for tensor in (x, *parameters))


def checkpoint(block, x):
    return Again.apply(block, x, *block.parameters()) if torch.is_grad_enabled() else block(x)
