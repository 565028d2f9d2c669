"""An all-reduce in 8 bits, whose error does not grow with the number of ranks.

    rank r     cuts its gradient into P parts, in 8 bits ── all-to-all ─▶ part r of every rank, added up in 32 bits
               the sum of part r, in 8 bits again        ── all-gather ─▶ all sums

A ring that passes on a sum in 8 bits would round it at each of P - 1 hops, and the sum grows on the
way. Here each gradient is rounded once, and the sum once, whatever P is. Nothing is kept back:
roundings are as often up as down.

Cost: an all-to-all and an all-gather, 2 (P - 1)/P x (1 + 4/256) bytes an element, a quarter of 32
bits. (Dettmers 2015; Wang et al. 2023, ZeRO++, section 4.3.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, all_to_all
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.flat import give, joined, size_of
from minidist.full.replica import Remembered
from minidist.further.few_bits import BLOCK, pack, unpack


class Int8:
    """What the gradients of a bucket travel as.

    Parameters
    ----------
    parameters : list of nn.Parameter
        Whose gradients they are.
    ranks : int
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: int) -> None:
        self.size = size_of(parameters)
        each = -(-self.size // ranks)
        self.row = -(-each // BLOCK) * BLOCK  # whole blocks

    def reduce(self, gradients: list[Tensor], comm: Communicator) -> None:
        """Replace this rank's gradients by the rounded sum of all ranks'. Collective.

        What is not finite makes its block so.
        """
        row, ranks = self.row, comm.size
        flat = joined(gradients, torch.float32)
        padded = flat.new_zeros(ranks * row)
        padded[: self.size] = flat

        rows = padded.view(ranks, row)
        leaving = pack(rows, bits=8)
        arrived = all_to_all(leaving, comm)
        parts = unpack(arrived, row, bits=8)
        mine = parts.sum(0, keepdim=True)

        packed = pack(mine, bits=8)
        everyones = all_gather(packed, comm, counts=[1] * ranks)
        sums = unpack(everyones, row, bits=8)
        total = sums.view(-1)
        give(total[: self.size], gradients)

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""
        scale = 4 / BLOCK
        bytes = self.row * (1 + scale)
        return 2 * (ranks - 1) * bytes

    def remembered(self) -> tuple[Remembered, ...]:
        """Return nothing: nothing is kept back."""
        return ()
