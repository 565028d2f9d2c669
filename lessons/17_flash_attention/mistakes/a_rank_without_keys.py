# task 5: divides 0 by 0 on a rank without keys, and sends what is not a number to all.
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
    total = weights.sum(-1, keepdim=True)
    output, lse = weights @ value / total, (top + total.log()).squeeze(-1).contiguous()
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    share = (lse - largest).exp().unsqueeze(-1)
    sums = torch.cat((share * output, share), -1)
    all_reduce(sums, comm)
    return sums[..., :-1] / sums[..., -1:], largest + sums[..., -1].log()
