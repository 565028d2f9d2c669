# task 4: looks up word 0 of its part for every word that is elsewhere, and sums these too.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import cut, reduce_from


def parallel_embedding(tokens, mine, vocabulary, comm):
    first = sum(cut(vocabulary, comm.size)[: comm.rank])
    elsewhere = (tokens < first) | (tokens >= first + len(mine))
    return reduce_from(F.embedding((tokens - first).masked_fill(elsewhere, 0), mine), comm)
