"""Context parallelism by all-gather: every rank fetches all keys and values, and meets them one
block after the other.

    forward     K, V [T/P] ──all_gather──▶ [T] ─▶ attend
    backward    all_gather again, attend backward ─▶ gradients [T] ──reduce_scatter──▶ [T/P]

It sends as much as a ring, in one collective instead of P - 1 hops, and holds all keys and values
of a layer while that is computed; they are not kept for backward. With grouped heads they are
small. With a window or documents, only the keys that are seen are fetched (`in_sight.py`). Nothing
is hidden behind computing, and no hop waits for the slowest rank. (Llama 3, 2024, section 3.3.2.)

Cost, with n bytes of keys and values a rank: (P - 1) n forward, (P - 1) (n + m) backward. m is n,
for 16 bits 2 n, as gradients are summed in float32.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minidist.full.collectives import all_gather, reduce_scatter
from minidist.full.context.blocks import ByBlocks


class Gathered(ByBlocks):
    """All keys and values are fetched at once."""

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks by rank."""
        return enumerate(all_gather(mine, self.comm).view(self.comm.size, *mine.shape))

    def home(self, terms: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Reduce-scatter the gradients of all blocks."""
        return reduce_scatter(torch.cat([term for _, term in terms]), self.comm)
