# task 5: keeps the sums of earlier blocks as they are when a larger score comes.
import torch
from solution import *  # noqa: F403


def ring_attention(query, key, value, comm):
    right, left, time = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, query.shape[2]
    normalizer, total, blocks = 0, 0, torch.stack((key, value))
    for step in range(comm.size):
        if step:
            arriving = torch.empty_like(blocks)
            comm.exchange(blocks, right, arriving, left)
            blocks = arriving
        if step <= comm.rank:
            scores = query @ blocks[0].transpose(-1, -2) / query.shape[-1] ** 0.5
            if step == 0:
                scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -torch.inf)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            normalizer, total = normalizer + weights.sum(-1, keepdim=True), total + weights @ blocks[1]
    return total / normalizer
