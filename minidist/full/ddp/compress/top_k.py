"""Top-k: each rank sends its largest elements, and keeps the others for later.

    gradient + kept     0.1  -3.0   0.2   1.0        rank 0 sends (1, -3.0), (3, 1.0)
                        2.0   0.3   0.1  -4.0        rank 1 sends (0,  2.0), (3, -4.0)
    sum of what came    2.0  -3.0   0    -3.0        an index that several send adds up
    kept by rank 0      0.1   0     0.2   0

Ranks choose different indices, so no all-reduce can add them on the way: every rank gets all pairs
(all-gather), and what it gets grows with the number of ranks.

What an element has waited for is sent all at once. An optimizer with momentum m would have moved
all the while, by more each step. With `momentum`, what is kept is not the sum of gradients but the
sum of velocities u = m u + gradient, and what is sent stops there, too, so that old gradients do not
go on (momentum correction and factor masking). The optimizer then is plain SGD.

Cost: an all-gather of k (4 + itemsize) bytes from each rank. (Aji and Heafield 2017; Lin et al.
2018, Deep Gradient Compression, sections 3.1 to 3.3.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.flat import (
    by_parameter,
    give,
    joined,
    overflowed,
    size_of,
    wide,
)
from minidist.full.replica import Remembered

INDEX = torch.int32


class TopK:
    """What the gradients of a bucket travel as.

    Parameters
    ----------
    parameters : list of nn.Parameter
        Whose gradients they are.
    share : float
        Which part of the elements is sent, at least one.
    momentum : float
        Of the velocities that are kept in place of gradients; 0: gradients.

    Memory: what is kept back, which has the bytes of the gradients (twice, if these have 16 bits);
    with momentum twice that.
    """

    def __init__(self, parameters: list[nn.Parameter], share: float, momentum: float = 0.0) -> None:
        self.parameters, self.momentum = parameters, momentum
        size = size_of(parameters)
        dtype = wide(parameters)
        device = parameters[0].device
        self.count = max(1, round(share * size))
        self.kept = torch.zeros(size, dtype=dtype, device=device)
        self.velocity: Tensor | None = None
        if momentum:
            self.velocity = torch.zeros_like(self.kept)
        # bytes of the places and values that a rank sends
        self.places = self.count * INDEX.itemsize
        self.values = self.count * dtype.itemsize

    def reduce(self, gradients: list[Tensor], comm: Communicator) -> None:
        """Replace this rank's gradients by the sum of what all ranks have sent. Collective.

        If a 16-bit gradient overflows, all become NaN, and nothing that is kept changes: a loss
        scaler then leaves the step out.
        """
        new = joined(gradients, self.kept.dtype)
        velocity = self.velocity
        if velocity is not None:
            new.add_(velocity, alpha=self.momentum)
        whole = new + self.kept
        sizes = whole.abs()
        largest = sizes.topk(self.count, sorted=False)
        chosen = largest.indices
        values = whole[chosen]
        total = self._sum_of_all(chosen, values, comm)
        if overflowed(total, gradients):
            return

        whole[chosen] = 0
        self.kept.copy_(whole)
        if velocity is not None:
            new[chosen] = 0
            velocity.copy_(new)
        give(total, gradients)

    def _sum_of_all(self, chosen: Tensor, values: Tensor, comm: Communicator) -> Tensor:
        """Return the sum of what all ranks have chosen, the same bits on every rank."""
        places = chosen.to(INDEX)
        parts = places.view(torch.uint8), values.view(torch.uint8)
        mine = torch.cat(parts)
        row_each = [1] * comm.size
        rows = all_gather(mine[None], comm, counts=row_each)
        total = torch.zeros_like(self.kept)
        for row in rows:
            where, what = torch.split(row, [self.places, self.values])
            # copies, as memory has to be aligned to be read as other numbers
            theirs = where.clone().view(INDEX)
            indices = theirs.long()
            addends = what.clone().view(total.dtype)
            total.index_add_(0, indices, addends)
        return total

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""
        return (ranks - 1) * (self.places + self.values)

    def remembered(self) -> Iterator[Remembered]:
        """Yield what is kept back."""
        yield from by_parameter("kept back", self.kept, self.parameters)
        if self.velocity is not None:
            yield from by_parameter("velocity", self.velocity, self.parameters)
