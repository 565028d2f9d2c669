"""One bit an element: its sign, and for each block of 256 the mean magnitude.

    rank r     gradient + kept, cut into P parts, in signs ── all-to-all ─▶ part r of every rank, added up
               the sum of part r, in signs as well         ── all-gather ─▶ all sums
               kept: gradient + kept, less what was sent; of part r also the sum, less what was sent of it

Signs alone would go astray: an element of 0.001 counts as much as its neighbour of 1. What is kept
makes up for it, on both sides: a rank keeps what it has rounded of its own gradient, and, as the one
who adds up part r, what was rounded of that sum. So all that was ever sent, and all that is kept, is
the sum of all gradients. A block whose gradients were always 0 (rows that no token has chosen) has
the magnitude 0, and stays where it is.

Cost: an all-to-all and an all-gather, 2 (P - 1)/P x (1/8 + 4/256) bytes an element. (Seide et al.
2014; Tang et al. 2021, 1-bit Adam, whose errors of both sides are kept apart.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, all_to_all
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
from minidist.further.few_bits import BLOCK, pack_signs, unpack_signs


class OneBit:
    """What the gradients of a bucket travel as.

    Parameters
    ----------
    parameters : list of nn.Parameter
        Whose gradients they are.
    ranks : int

    Memory: what is kept, which has the bytes of the gradients (twice, if these have 16 bits).
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: int) -> None:
        self.parameters = parameters
        self.size = size_of(parameters)
        each = -(-self.size // ranks)
        self.row = -(-each // BLOCK) * BLOCK  # whole blocks
        dtype = wide(parameters)
        device = parameters[0].device
        self.kept = torch.zeros(self.size, dtype=dtype, device=device)

    def reduce(self, gradients: list[Tensor], comm: Communicator) -> None:
        """Replace this rank's gradients by the sum of what all ranks have sent. Collective.

        If a 16-bit gradient overflows, all become NaN, and nothing that is kept changes: a loss
        scaler then leaves the step out.
        """
        row, ranks = self.row, comm.size
        dtype = self.kept.dtype
        whole = self.kept.new_zeros(ranks * row)
        whole[: self.size] = joined(gradients, dtype) + self.kept

        rows = whole.view(ranks, row)
        leaving = pack_signs(rows)
        rest = rows - unpack_signs(leaving, row).to(dtype)
        arrived = all_to_all(leaving, comm)
        parts = unpack_signs(arrived, row).to(dtype)
        mine = parts.sum(0, keepdim=True)

        packed = pack_signs(mine)
        sent = unpack_signs(packed, row).to(dtype)
        rest[comm.rank] += (mine - sent)[0]
        everyones = all_gather(packed, comm, counts=[1] * ranks)
        sums = unpack_signs(everyones, row)
        total = sums.view(-1)[: self.size]
        if overflowed(total, gradients):
            return

        self.kept.copy_(rest.view(-1)[: self.size])
        give(total, gradients)

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""
        scale = 4 / BLOCK
        bytes = self.row * (1 / 8 + scale)
        return 2 * (ranks - 1) * bytes

    def remembered(self) -> Iterator[Remembered]:
        """Yield what is kept."""
        return by_parameter("kept back", self.kept, self.parameters)
