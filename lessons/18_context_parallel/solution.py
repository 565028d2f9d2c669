"""Lesson 18, solved: `minidist/context.py`, and `blocks.py`, `order.py` and `ulysses.py` of
`minidist/full/context`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from minidist import Communicator
from minidist.context import RingAttention, pass_on
from minidist.full import adjoint
from minidist.full.context import blocks
from minidist.full.context.order import ORDERS, Meeting, meeting, multiple, positions
from minidist.full.context.ulysses import Ulysses, heads_fault
from minidist.full.model import Where, cross_entropy_sum
from minidist.full.model.attention import causal_attention


def meet(
    query: Tensor, output: Tensor, lse: Tensor, key: Tensor, value: Tensor, causal: bool
) -> None:
    """Attend to a block, and merge."""
    blocks.meet(
        blocks.Attended(query, output, lse), torch.stack((key, value)), Meeting(causal=causal)
    )


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Let keys and values go round."""
    kept: dict[str, tuple[Tensor, ...]] = {}
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: kept.update(tensors=tensors))
    output = RingAttention.forward(ctx, query, key, value, comm)
    return output, kept["tensors"][-1].squeeze(-1)


def ring_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    comm: Communicator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Let them go round again, with their gradients."""
    saved = query, torch.stack((key, value)), output, lse.unsqueeze(-1)
    ctx = SimpleNamespace(saved_tensors=saved, comm=comm)
    return RingAttention.backward(ctx, gradient)[:3]


def by_rank(order: str, ranks: int, time: int) -> Tensor:
    """Return the positions of the tokens of all ranks, rank by rank; nothing if they cannot be
    shared out so.
    """
    if time % multiple(order, ranks):
        return torch.tensor([])
    return torch.cat([positions(order, ranks, rank, time) for rank in range(ranks)])


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, everyones: Tensor, comm: Communicator
) -> Tensor:
    """Exchange tokens for heads, attend, exchange back."""
    order = next(
        order
        for order in ORDERS
        if torch.equal(by_rank(order, comm.size, len(everyones)), everyones)
    )
    return Ulysses(comm, order, causal_attention)(query, key, value)


def share_of_the_loss(
    model: Callable[[Tensor, Where], Tensor], tokens: Tensor, mine: Tensor
) -> Tensor:
    """Cut inputs and labels alike, and divide by the labels of all ranks."""
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)
    return (
        cross_entropy_sum(model(tokens[:, mine], Where(positions=mine)), labels[:, mine])
        / (labels >= 0).sum()
    )


__all__ = [
    "Meeting",
    "adjoint",
    "causal_attention",
    "heads_fault",
    "meet",
    "meeting",
    "pass_on",
    "positions",
    "ring_backward",
    "ring_forward",
    "share_of_the_loss",
    "ulysses_attention",
]
