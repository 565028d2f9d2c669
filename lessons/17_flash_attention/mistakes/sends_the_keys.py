# task 5: gathers the keys and values of all ranks, so the messages grow with the keys.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather, all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    counts = torch.zeros(comm.size, dtype=torch.float64)
    counts[comm.rank] = key.shape[2]
    all_reduce(counts, comm)
    counts = [int(count) for count in counts]
    whole = (
        all_gather(x.movedim(2, 0).contiguous(), comm, counts=counts).movedim(0, 2).contiguous()
        for x in (key, value)
    )
    return attend(query, *whole, False)
