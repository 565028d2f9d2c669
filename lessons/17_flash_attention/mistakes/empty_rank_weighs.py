# task 5: lse is 0, not -inf, on a rank without keys, so that it has a weight.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    output, lse = torch.zeros_like(query), torch.zeros_like(query[..., 0])
    if key.shape[2]:
        output, lse = (x.contiguous() for x in attend(query, key, value, False))
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    share = (lse - largest).exp().unsqueeze(-1)
    sums = torch.cat((share * output, share), -1)
    all_reduce(sums, comm)
    return sums[..., :-1] / sums[..., -1:], largest + sums[..., -1].log()
