# task 2: waits for all blocks, and computes one softmax of all keys: everything is held.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    keys, values = (torch.cat(each, 2) for each in zip(*blocks, strict=True))
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ values, scores.logsumexp(-1)
