"""Context parallelism by all-gather: every rank fetches all keys and values, and meets them one block after the other.

    forward     K, V [T/P] ──all_gather──▶ [T] ─▶ attend
    backward    all_gather again, attend backward ─▶ gradients [T] ──reduce_scatter──▶ [T/P]

It sends as much as a ring, in one collective instead of P - 1 hops, and holds all keys and values of one layer while
that is computed; they are not kept for backward. With grouped heads they are small. Nothing is hidden behind computing,
and no hop waits for the slowest rank. (Llama 3, 2024, section 3.3.2.)

Cost, with n bytes of keys and values a rank: forward (P - 1) n, backward (P - 1) (n + m). m is n, for 16 bits 2n, as
gradients are summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minidist import collectives
from minidist.comm import Communicator
from minidist.model.gpt import Attend
from minidist.parallel.context.blocks import Attended, before_any, meet, meet_backward
from minidist.parallel.context.flash import wide
from minidist.parallel.context.order import meeting


@dataclass(frozen=True)
class Gathered:
    """Who gathers, in which order the tokens lie, and what attends to tokens of one rank."""

    comm: Communicator
    order: str
    serial: Attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the tokens of all ranks: [B, H, T/P, d], by this rank's query, key and value of that shape."""
        return GatheredAttention.apply(query, key, value, self)  # type: ignore[no-any-return, no-untyped-call]

    def blocks(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the keys and values of all ranks: [P, 2, B, H_kv, T/P, d]."""
        gathered: Tensor = collectives.all_gather(torch.stack((key, value)), self.comm)
        return gathered.view(self.comm.size, 2, *key.shape)


class GatheredAttention(torch.autograd.Function):
    """Attention of one rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, gathered: Gathered) -> Tensor:
        """Gather, and meet every block."""
        mine = before_any(query)
        for source, block in enumerate(gathered.blocks(key, value)):
            if met := meeting(gathered.order, gathered.comm.rank, source, query.shape[2]):
                meet(mine, block, met)
        ctx.gathered = gathered
        output = mine.output.to(query.dtype)
        ctx.save_for_backward(query, output, mine.lse, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gather and meet again, and give each block's gradients back to its rank."""
        *saved, key, value = ctx.saved_tensors
        mine, comm, order = Attended(*saved), ctx.gathered.comm, ctx.gathered.order
        blocks = ctx.gathered.blocks(key, value)
        to_query, to_blocks = torch.zeros_like(mine.query, dtype=wide(key)), torch.zeros_like(blocks, dtype=wide(key))
        for source, (block, to_block) in enumerate(zip(blocks, to_blocks, strict=True)):
            if met := meeting(order, comm.rank, source, key.shape[2]):
                meet_backward(gradient, mine, block, met, to_query, to_block)
        to_key, to_value = collectives.reduce_scatter(to_blocks.flatten(0, 1), comm).to(key.dtype)
        return to_query.to(key.dtype), to_key, to_value, None
