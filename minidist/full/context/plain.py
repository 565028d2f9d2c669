"""Ring attention on a page: contiguous tokens, and each hop is awaited before the next block is
computed.

    rank r has the queries of its tokens, and first its own keys and values. P times:
        attend to the block at hand, if it is not later than mine
        merge the result
        hand the block to rank r + 1, and take that of rank r - 1

    backward goes round once more. With each block travel its gradients, to which every rank adds
    its terms; one hop after the last rank they are at home.

A block's share of the whole softmax is exp(score - lse) with the lse of *all* blocks: backward
needs the merged output and lse, never a block's own. (Liu, Zaharia & Abbeel 2023, "Ring attention",
algorithm 1.)
"""

from typing import Any

import torch
from torch import Tensor

from minidist.full.comm import Communicator
from minidist.full.context.blocks import Attended, before_any, meet, meet_backward, wide
from minidist.full.context.order import Meeting


class PlainRingAttention(torch.autograd.Function):
    """`PlainRingAttention.apply(query, key, value, comm)`: causal attention of this rank's tokens
    to those of all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        comm: Communicator,
    ) -> Tensor:
        """Return [B, H, T/P, d]; saves query, key, value, output and lse."""
        mine, block = before_any(query), torch.stack((key, value))
        for hop in range(comm.size):
            source = (comm.rank - hop) % comm.size
            if source <= comm.rank:
                meet(mine, block, Meeting(causal=source == comm.rank))
            if hop + 1 < comm.size:
                block = pass_on(block, comm)
        ctx.comm = comm
        output = mine.output.to(query.dtype)
        ctx.save_for_backward(query, output, mine.lse, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of query, key and value."""
        *saved, key, value = ctx.saved_tensors
        mine, comm, block = Attended(*saved), ctx.comm, torch.stack((key, value))
        to_query = torch.zeros_like(mine.query, dtype=wide(key))
        to_block = torch.zeros_like(block, dtype=wide(key))
        for hop in range(comm.size):
            source = (comm.rank - hop) % comm.size
            if source <= comm.rank:
                met = Meeting(causal=source == comm.rank)
                meet_backward(gradient, mine, block, met, to_query, to_block)
            if hop + 1 < comm.size:
                block = pass_on(block, comm)
            to_block = pass_on(to_block, comm)  # after the last hop, too: it brings them home
        to_key, to_value = to_block.to(key.dtype)
        return to_query.to(key.dtype), to_key, to_value, None


def pass_on(block: Tensor, comm: Communicator) -> Tensor:
    """Send a block to the next rank of the ring; return that of the rank before."""
    if comm.size == 1:
        return block
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arriving = torch.empty_like(block)
    comm.exchange(block, right, arriving, left)
    return arriving
