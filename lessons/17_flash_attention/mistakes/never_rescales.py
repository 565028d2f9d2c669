# task 2: adds weights that are relative to another largest score, and corrects nothing when it grows.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    largest = torch.full_like(query[..., :1], -torch.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(query)
    for key, value in blocks:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - now).exp()
        total, output = total + weights.sum(-1, keepdim=True), output + weights @ value
        largest = now
    return output / total, (largest + total.log()).squeeze(-1)
