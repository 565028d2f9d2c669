# task 2: keeps each block's output and lse, and merges them at the end: what is held grows with the blocks.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    outputs, lses = [], []
    for key, value in blocks:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        outputs.append(scores.softmax(-1) @ value)
        lses.append(scores.logsumexp(-1))
    lse = torch.stack(lses).logsumexp(0)
    return sum(
        o * (part - lse).exp().unsqueeze(-1) for o, part in zip(outputs, lses, strict=True)
    ), lse
