# task 5: takes exp(lse) without subtracting the largest: it is infinite from about 700 on.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    output, lse = (x.contiguous() for x in attend(query, key, value, False))
    share = lse.exp().unsqueeze(-1)
    sums = torch.cat((share * output, share), -1)
    all_reduce(sums, comm)
    return sums[..., :-1] / sums[..., -1:], sums[..., -1].log()
