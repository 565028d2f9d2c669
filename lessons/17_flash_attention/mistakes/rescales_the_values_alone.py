# task 2: shrinks the weighted values when a larger score comes, and forgets the sum of the weights.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    largest = torch.full_like(query[..., :1], -torch.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(query)
    for key, value in blocks:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - now).exp(), (largest - now).exp()
        total, output = total + weights.sum(-1, keepdim=True), shrink * output + weights @ value
        largest = now
    return output / total, (largest + total.log()).squeeze(-1)
