# task 2: takes exp of the scores as they are, which overflows from about 700 on.
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    total, output = torch.zeros_like(query[..., :1]), torch.zeros_like(query)
    for key, value in blocks:
        weights = (query @ key.mT / query.shape[-1] ** 0.5).exp()
        total, output = total + weights.sum(-1, keepdim=True), output + weights @ value
    return output / total, total.log().squeeze(-1)
