"""Ring attention with tokens in any order: the next block travels while this one is met.

    computing    own block       block of r - 1     block of r - 2   ...
    stream       └ next block ┘  └ next block ┘     └ ...

With a window or documents, `in_sight.py` takes the place of the ring.

Cost, with n bytes of keys and values a rank (not repeated for grouped heads): (P - 1) n in P - 1
messages forward, and (P - 1) n + P m in 2 P - 1 messages backward. m is n, for 16 bits 2 n, as
gradients are summed in float32. (Liu, Zaharia & Abbeel 2023; zigzag: see `order.py`.)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from minidist.context import pass_on
from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle, Stream
from minidist.full.context.blocks import ByBlocks
from minidist.full.context.in_sight import InSight
from minidist.full.context.order import Sight


@dataclass(frozen=True)
class Ring(ByBlocks):
    """Keys and values go round on a `stream` of the communicator."""

    stream: Stream[Communicator]

    def within(self, sight: Sight) -> InSight:
        """Return what sends only the keys that are seen, on the same stream."""
        return InSight(self.comm, sight, self.stream)

    def hop(self, block: Tensor) -> Handle:
        """Begin to send a block to the next rank; the result is that of the rank before."""
        return self.stream.launch(pass_on, block, self.stream.comm)

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's block first, and then those of the ranks before it."""
        block, rank, ranks = mine, self.comm.rank, self.comm.size
        for hop in range(ranks - 1):
            arriving = self.hop(block)
            yield (rank - hop) % ranks, block
            block = arriving.wait()
        yield (rank + 1) % ranks, block

    def home(self, terms: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Let the gradients of each block follow it round.

        They are at home one hop after the last rank.
        """
        several = iter(terms)
        arriving = self.hop(next(several)[1])
        for _, term in several:
            term += arriving.wait()
            arriving = self.hop(term)
        return arriving.wait()  # type: ignore[no-any-return]
