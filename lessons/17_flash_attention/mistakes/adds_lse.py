# task 5: adds the ranks' lse, where their exponentials add up.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    output, lse = (x.contiguous() for x in attend(query, key, value, False))
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    share = (lse - largest).exp().unsqueeze(-1)
    sums = torch.cat((share * output, share), -1)
    all_reduce(sums, comm)
    every = lse.clone()
    all_reduce(every, comm)
    return sums[..., :-1] / sums[..., -1:], every
