# task 5: weighs each rank by its number of keys: the weight is its share of the denominator.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    output, lse = (x.contiguous() for x in attend(query, key, value, False))
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    sums = torch.cat((key.shape[2] * output, torch.full_like(lse, key.shape[2]).unsqueeze(-1)), -1)
    all_reduce(sums, comm)
    return sums[..., :-1] / sums[..., -1:], largest
