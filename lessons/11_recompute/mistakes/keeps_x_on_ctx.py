# task 2: hangs x onto ctx, where it stays after backward, as long as somebody has the result.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.x, ctx.parameters = x, parameters
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        kept, parameters = ctx.x, ctx.parameters
        x = kept.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            y = ctx.block(x)
        wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        return None, *(next(found) if tensor.requires_grad else None for tensor in (x, *parameters))


def checkpoint(block, x):
    return Again.apply(block, x, *block.parameters()) if torch.is_grad_enabled() else block(x)
