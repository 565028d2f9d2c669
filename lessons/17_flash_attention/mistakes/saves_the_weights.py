# task 4: saves all weights for backward, to spare computing them again: they are the matrix of T x T.
import solution
import torch
from solution import *  # noqa: F403


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, causal):
        output, lse = solution.flash_forward(query, key, value, causal)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
            )
        ctx.save_for_backward(query, key, value, output, (scores - lse[..., None]).exp())
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, p = ctx.saved_tensors
        ds = (
            p
            * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True))
            / query.shape[-1] ** 0.5
        )
        return ds @ key, ds.mT @ query, p.mT @ gradient, None


def flash_attention(query, key, value, causal):
    return Function.apply(query, key, value, causal)
