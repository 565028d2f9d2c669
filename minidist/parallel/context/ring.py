"""Ring attention: queries stay, keys and values go round, and the next block travels while this one is computed.

    hop     0        1        2        3
    rank 0  K0 ◣     K3 .     K2 .     K1 .       contiguous order: most of a block is masked, or all of it
    rank 1  K1 ◣     K0 ■     K3 .     K2 .
    rank 2  K2 ◣     K1 ■     K0 ■     K3 .
    rank 3  K3 ◣     K2 ■     K1 ■     K0 ■

What it does beyond `plain.py`: it takes any order of tokens (see `order.py`), and overlaps: each hop is launched on a
stream and awaited after the block at hand is computed.

Forward saves queries, keys, values, output and lse of this rank's tokens, and no T x T weights. Backward sends keys and
values round again. Their gradients travel behind them, one hop later: a rank adds its term to what the rank before has
sent, and after P hops the sum is at home.

Cost, with n bytes of keys and values a rank (not repeated for grouped heads): (P - 1) n in P - 1 messages forward, and
(P - 1) n + P m in 2P - 1 messages backward. m is n, for 16 bits 2n, as sums of gradients travel in float32.
(Liu, Zaharia & Abbeel 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minidist.comm import Communicator
from minidist.comm.stream import Handle, Stream
from minidist.model.gpt import Attend
from minidist.parallel.context.blocks import Attended, before_any, meet, meet_backward
from minidist.parallel.context.flash import wide
from minidist.parallel.context.order import meeting
from minidist.parallel.context.plain import pass_on


@dataclass(frozen=True)
class Ring:
    """Who is in the ring, and in which order the tokens lie.

    Attributes
    ----------
    stream : Stream
        Of the communicator along the context axis.
    order : str
        In which the tokens lie.
    serial : Attend
        What attends to tokens of one rank.
    """

    stream: Stream[Communicator]
    order: str
    serial: Attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the tokens of all ranks: [B, H, T/P, d], by this rank's query, key and value of that shape."""
        return RingAttention.apply(query, key, value, self)  # type: ignore[no-any-return, no-untyped-call]

    def hop(self, block: Tensor) -> Handle:
        """Begin to send a block to the next rank; the result is that of the rank before."""
        return self.stream.launch(pass_on, block, self.stream.comm)

    def blocks(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's block, this rank's first, each with its rank; the next one travels meanwhile."""
        comm = self.stream.comm
        for hop in range(comm.size - 1):
            arriving = self.hop(block)
            yield (comm.rank - hop) % comm.size, block
            block = arriving.wait()
        yield (comm.rank + 1) % comm.size, block


class RingAttention(torch.autograd.Function):
    """Attention of one rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        """Meet every block."""
        mine, rank, time = before_any(query), ring.stream.comm.rank, query.shape[2]
        for source, block in ring.blocks(torch.stack((key, value))):
            if met := meeting(ring.order, rank, source, time):
                meet(mine, block, met)
        ctx.ring = ring
        output = mine.output.to(query.dtype)
        ctx.save_for_backward(query, output, mine.lse, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Meet every block again; what a rank has to say to a block follows it round."""
        *saved, key, value = ctx.saved_tensors
        mine, ring, rank, time = Attended(*saved), ctx.ring, ctx.ring.stream.comm.rank, key.shape[2]
        to_query = torch.zeros_like(mine.query, dtype=wide(key))
        arriving: Handle | None = None
        for source, block in ring.blocks(torch.stack((key, value))):
            to_block = torch.zeros_like(block, dtype=wide(key))
            if met := meeting(ring.order, rank, source, time):
                meet_backward(gradient, mine, block, met, to_query, to_block)
            if arriving is not None:
                to_block += arriving.wait()
            arriving = ring.hop(to_block)
        assert arriving is not None
        to_key, to_value = arriving.wait().to(key.dtype)
        return to_query.to(key.dtype), to_key, to_value, None
