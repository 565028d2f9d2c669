# task 3: masks the key of a query's own place, too: the first query sees nothing.
import torch
from solution import *  # noqa: F403

TILE = 128


def flash_forward(query, key, value, causal):
    output = torch.zeros_like(query)
    lse = torch.zeros_like(query[..., 0])
    queries, keys = query.shape[2], key.shape[2]
    for top in range(0, queries, TILE):
        q = query[:, :, top : top + TILE]
        largest = torch.full_like(q[..., :1], -torch.inf)
        total, sums = torch.zeros_like(largest), torch.zeros_like(q)
        for left in range(0, min(keys, top + TILE) if causal else keys, TILE):
            k, v = key[:, :, left : left + TILE], value[:, :, left : left + TILE]
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if causal:
                row, column = (
                    torch.arange(top, top + q.shape[2])[:, None],
                    torch.arange(left, left + k.shape[2]),
                )
                scores = scores.masked_fill(column >= row, -torch.inf)
            now = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - now).exp(), (largest - now).exp()
            total = shrink * total + weights.sum(-1, keepdim=True)
            sums = shrink * sums + weights @ v
            largest = now
        output[:, :, top : top + TILE] = sums / total
        lse[:, :, top : top + TILE] = (largest + total.log()).squeeze(-1)
    return output, lse
