# task 4: hangs the tensors onto ctx, where they stay after backward, as long as somebody has the output.
import solution
import torch
from solution import *  # noqa: F403


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, causal):
        output, lse = solution.flash_forward(query, key, value, causal)
        ctx.kept, ctx.lse, ctx.causal = (query, key, value), lse, causal
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        return (
            *solution.flash_backward(gradient, *ctx.kept, *ctx.saved_tensors, ctx.lse, ctx.causal),
            None,
        )


def flash_attention(query, key, value, causal):
    return Function.apply(query, key, value, causal)
