# task 3: takes a tile of queries and all keys at once: without an online softmax, and memory grows with T per tile.
import torch
from solution import *  # noqa: F403


def flash_forward(query, key, value, causal):
    outputs, lses = [], []
    for top in range(0, query.shape[2], 128):
        q = query[:, :, top : top + 128]
        seen = min(key.shape[2], top + q.shape[2]) if causal else key.shape[2]
        scores = q @ key[:, :, :seen].mT / q.shape[-1] ** 0.5
        if causal:
            row, column = torch.arange(top, top + q.shape[2])[:, None], torch.arange(seen)
            scores = scores.masked_fill(column > row, -torch.inf)
        outputs.append(scores.softmax(-1) @ value[:, :, :seen])
        lses.append(scores.logsumexp(-1))
    return torch.cat(outputs, 2), torch.cat(lses, 2)
