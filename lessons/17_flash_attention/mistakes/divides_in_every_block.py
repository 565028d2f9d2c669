# task 2: gives each block a softmax of its own, and takes the mean.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    outputs, total = [], 0.0
    for key, value in blocks:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        outputs.append(scores.softmax(-1) @ value)
        total = (
            torch.logaddexp(torch.as_tensor(total), scores.logsumexp(-1))
            if len(outputs) > 1
            else scores.logsumexp(-1)
        )
    return sum(outputs) / len(outputs), total
