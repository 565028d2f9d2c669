# task 3: computes all scores at once: the matrix of T x T that nobody has room for.
import torch
from solution import *  # noqa: F403


def flash_forward(query, key, value, causal):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
