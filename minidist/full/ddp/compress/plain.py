"""Top-k with error feedback on a page: each rank sends its largest elements, and keeps the others.

    kept        += gradient
    chosen       the k elements of `kept` that are largest in size
    sent         their places and values; in `kept` they become 0
    gradient     the sum of what all ranks have sent: a place that several have chosen adds up

    after t steps, summed over ranks:    sent so far + kept now = all gradients so far

An element that is never large enough alone is sent once enough of it has come together. Without
`kept` it would be lost for good, and training would stop where the small elements lead. (Stich et
al. 2018, "Sparsified SGD with memory"; Aji and Heafield 2017.)

Cost: an all-gather of k places and one of k values: (P - 1) k (4 + itemsize) bytes a rank, where an
all-reduce of n elements sends 2 (P - 1)/P n itemsize. Memory: `kept`, as large as the gradient.
"""

import torch
from torch import Tensor

from minidist.full.collectives import all_gather
from minidist.full.comm import Communicator


@torch.no_grad()
def sparse_all_reduce(gradient: Tensor, kept: Tensor, count: int, comm: Communicator) -> None:
    """Replace a flat gradient [n] by the sum of what all ranks send of it. Collective.

    `kept` [n] is this rank's own, zeros at first, and `count` is k. Every rank ends with the same
    bits.
    """
    kept += gradient
    chosen = kept.abs().topk(count).indices
    values = kept[chosen]
    kept[chosen] = 0
    places = all_gather(chosen.to(torch.int32), comm)  # [P k], rank by rank
    addends = all_gather(values, comm)
    gradient.zero_()
    gradient.index_add_(0, places.long(), addends)
