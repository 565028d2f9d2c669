"""Lesson 19, solved: `minidist/full/model/moe/`, and `dispatch.py` of `minidist/full/expert`.

The book's `dispatch` has a function for each expert; an answer gets one for all of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist import Communicator
from minidist.full.adjoint import reduce_from
from minidist.full.collectives import all_reduce
from minidist.full.ddp.after_backward import reduce_gradients
from minidist.full.expert.dispatch import Dispatch
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPTConfig, Where
from minidist.full.model.moe import balance, losses
from minidist.full.model.moe.capacity import choices_with_room
from minidist.full.model.moe.combine import combine
from minidist.full.model.moe.losses import Attach
from minidist.full.model.moe.routed import RoutedExperts
from minidist.full.model.moe.router import choose, router_logits, weights_of

Experts = Callable[[Tensor, list[int]], Tensor]


def route(x: Tensor, router: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Score, choose, and weigh."""
    scores = router_logits(x, router).softmax(-1)
    choice = choose(scores, bias, k)
    return choice, weights_of(scores, choice, raw=k == 1)


def dispatch(
    x: Tensor, choice: Tensor, weights: Tensor, experts: Experts, held: int, comm: Communicator
) -> Tensor:
    """Send rows to their experts, and add up what comes back."""
    compute = Dispatch(experts, comm)  # type: ignore[arg-type]
    return combine(x[None], choice[None], weights[None], compute, held * comm.size)[0]


@dataclass
class Layer:
    """As in the exercise."""

    bias: Tensor
    tally: Tensor


def balance_loss(scores: Tensor, choice: Tensor, comm: Communicator) -> Tensor:
    """Count over whole sequences."""
    chosen = F.one_hot(choice, scores.shape[-1]).sum(2)
    return losses.balance_loss(scores, chosen, partial(reduce_from, comm=comm))


def attach(weights: Tensor, loss: Tensor, layer: Layer, counts: Tensor) -> Tensor:
    """Hang a loss on the weights."""
    return Attach.apply(weights, loss, layer, counts)


def kept(
    choice: Tensor, positions: Tensor, time: int, experts: int, factor: float, comm: Communicator
) -> Tensor:
    """Serve the first tokens of each sequence."""
    config = SimpleNamespace(capacity=factor, sequence=time, experts=experts)
    total = partial(reduce_from, comm=comm)
    return choices_with_room(choice, Where(positions=positions), config, total)


def rebalance(layer: Layer, comm: Communicator) -> None:
    """Count over all ranks, and move each bias by one."""
    experts = len(layer.bias)
    routed = RoutedExperts(
        GPTConfig(layers=1, experts=experts, top_k=1, raw_weights=True, balance="bias"), 0
    )
    routed.bias = layer.bias
    routed.tally[:experts] = layer.tally
    balance.rebalance(routed, partial(reduce_from, comm=comm))
    layer.tally = torch.zeros_like(layer.tally)


def groups(comm: Communicator, ep: int) -> tuple[Communicator, Communicator]:
    """Cut the data axis in another way."""
    mesh = Mesh(comm, Layout(dp=comm.size, ep=ep))
    return mesh.ep, mesh.over("edp")


def synchronize(
    router: Tensor, experts: Sequence[Tensor], tokens: int, edp: Communicator, comm: Communicator
) -> None:
    """Sum over those who have the same parameters, and divide by all tokens."""
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    reduce_gradients([[router]], comm, "sum", "auto")
    reduce_gradients([list(experts)], edp, "sum", "auto")
    for parameter in (router, *experts):
        parameter.grad /= total


__all__ = [
    "Experts",
    "Layer",
    "attach",
    "balance_loss",
    "dispatch",
    "groups",
    "kept",
    "rebalance",
    "route",
    "synchronize",
]
