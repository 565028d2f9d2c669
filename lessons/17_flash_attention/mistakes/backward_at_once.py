# task 4: computes all weights at once in backward: what forward saved is held now.
import torch
from solution import *  # noqa: F403


def flash_backward(gradient, query, key, value, output, lse, causal):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    p = (scores - lse[..., None]).exp()
    ds = (
        p
        * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True))
        / query.shape[-1] ** 0.5
    )
    return ds @ key, ds.mT @ query, p.mT @ gradient
