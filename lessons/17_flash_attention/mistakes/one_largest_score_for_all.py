# task 2: one largest score serves all queries: where a query's own are far below, all of its weights are 0.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    largest, total, sums = (
        torch.tensor(-torch.inf),
        torch.zeros_like(query[..., :1]),
        torch.zeros_like(query),
    )
    for key, value in blocks:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        now = torch.maximum(largest, scores.max())
        weights, shrink = (scores - now).exp(), (largest - now).exp()
        total = shrink * total + weights.sum(-1, keepdim=True)
        sums = shrink * sums + weights @ value
        largest = now
    return sums / total, (largest + total.log()).squeeze(-1)
