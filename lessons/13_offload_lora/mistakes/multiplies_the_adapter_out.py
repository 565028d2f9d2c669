# task 1: computes W + BA in every forward: a matrix as large as the weight, which is what an adapter is to avoid.
from solution import *  # noqa: F403
from torch import nn


class Adapted(nn.Module):
    def __init__(self, linear, A, B, scale):
        super().__init__()
        self.base, self.A, self.B, self.scale = linear, A, B, scale

    def forward(self, x):
        return nn.functional.linear(
            x, self.base.weight + self.scale * self.B @ self.A, self.base.bias
        )


def adapt(linear, rank, alpha, generator):
    import solution

    adapted = solution.adapt(linear, rank, alpha, generator)
    return Adapted(linear, adapted.A, adapted.B, alpha / rank)


def merge(adapted):
    merged = nn.Linear(*adapted.base.weight.T.shape, dtype=adapted.A.dtype, device="meta").to_empty(
        device="cpu"
    )
    merged.weight.data.copy_(adapted.base.weight + adapted.scale * adapted.B @ adapted.A)
    merged.bias.data.copy_(adapted.base.bias)
    return merged
