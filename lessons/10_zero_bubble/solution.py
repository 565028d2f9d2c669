"""Lesson 10, solved: the package's own schedules. Read them in `minidist/full/pipeline`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from minidist.full.pipeline import plan
from minidist.full.pipeline.weight_gradients import Product

Pairs = list[tuple[Tensor, Tensor]]


def stages_of(rank: int, ranks: int, chunks: int) -> list[int]:
    """Return the stages that `rank` has."""
    return plan("interleaved", ranks, ranks, chunks).stages_of(rank)


def warm_up(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Return how many forwards come before the turns: see
    `minidist.full.pipeline.schedules.interleaved`.
    """
    return min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, microbatches * chunks)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Return the words of `rank` under interleaved 1F1B."""
    return [
        str(action) for action in plan("interleaved", ranks, microbatches, chunks).actions[rank]
    ]


def backward_for_inputs(
    weights: Sequence[Tensor], activations: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor, Pairs]:
    """Go back through the layers; `minidist.full.pipeline.weight_gradients` has autograd do
    this.
    """
    pairs: Pairs = []
    for weight, x, y in reversed(
        list(zip(weights, activations[:-1], activations[1:], strict=True))
    ):
        inner = gradient * (1 - y * y)
        pairs.insert(0, (x, inner))
        gradient = inner @ weight
    return gradient, pairs


def backward_for_weights(pairs: Pairs) -> list[Tensor]:
    """Compute the products that were delayed."""
    return [Product(nn.Parameter(x.new_empty(0)), x, gradient).compute() for x, gradient in pairs]


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the words of `rank` under ZB-H1."""
    return [str(action) for action in plan("zb-h1", ranks, microbatches).actions[rank]]
