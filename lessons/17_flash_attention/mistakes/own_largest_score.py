# task 5: sums numerators and denominators that are relative to each rank's own largest score.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def attention_over_ranks(query, key, value, comm):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    top = (
        scores.amax(-1, keepdim=True)
        if key.shape[2]
        else torch.full_like(query[..., :1], -torch.inf)
    )
    weights = (scores - top).exp()
    sums = torch.cat((weights @ value, weights.sum(-1, keepdim=True)), -1)
    all_reduce(sums, comm)
    largest = top.squeeze(-1).contiguous()
    all_reduce(largest, comm, op="max")
    return sums[..., :-1] / sums[..., -1:], largest + sums[..., -1].log()
