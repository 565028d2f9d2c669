# task 2: assigns the parameters' gradients to .grad, where they are to be added to what is there.
import torch
from solution import *  # noqa: F403


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        kept, *parameters = ctx.saved_tensors
        x = kept.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            y = ctx.block(x)
        wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        first = next(found) if x.requires_grad else None
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = next(found)
        return None, first, *(None for _ in parameters)


def checkpoint(block, x):
    return Again.apply(block, x, *block.parameters()) if torch.is_grad_enabled() else block(x)
