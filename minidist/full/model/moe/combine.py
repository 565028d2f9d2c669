"""Tokens to their experts and back: sorted by expert, computed, put back in place, added up.

    x [N, D] ──▶ k copies of each token, sorted by expert: rows [M, D] ──▶ experts
             ──▶ back to their places [N, K, D] ──▶ weighted sum [N, D]

Rows go back to their places before they are added up, in float32 at least: a sum in the order of
arrival would not repeat. Choice j of token n has the number n k + j, and `order_M` lists the
numbers by expert.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minidist.full.model.moe.experts import Counts

Compute: TypeAlias = Callable[[Tensor, Counts], Tensor]
"""Maps rows [M, D], sorted by expert, to what the experts make of them [M, D]; the counts are of
all E experts.
"""


def combine(
    x_BTD: Tensor, choice_BTK: Tensor, weights_BTK: Tensor, compute: Compute, experts: int
) -> Tensor:
    """Return the weighted sum [B, T, D] of what the chosen experts make of each token.

    A choice of `experts`, which is no expert's number, stands for none.
    """
    order_M = choice_BTK.flatten().argsort(stable=True)
    if x_BTD.is_meta:  # nobody knows who is chosen: all alike
        counts = [len(part) for part in torch.empty(len(order_M)).tensor_split(experts)]
    else:
        counts = choice_BTK.flatten().bincount(minlength=experts + 1)[:experts].tolist()
    order_M = order_M[: sum(counts)]
    rows_MD: Tensor = Pick.apply(x_BTD.flatten(0, 1), order_M, choice_BTK.shape[-1])  # type: ignore[no-untyped-call]
    made_MD = compute(rows_MD, counts)
    total_ND: Tensor = Combine.apply(made_MD, order_M, weights_BTK.flatten(0, 1))  # type: ignore[no-untyped-call]
    return total_ND.view(x_BTD.shape).to(x_BTD.dtype)


class Pick(torch.autograd.Function):
    """The tokens whose choices an order names; backward adds up the gradients of a token's choices,
    in their order.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, k: int) -> Tensor:
        """Return rows [M, D]."""
        ctx.save_for_backward(order_M)
        ctx.k, ctx.tokens = k, len(x_ND)
        return x_ND.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the tokens."""
        (order_M,) = ctx.saved_tensors
        return in_places(gradient_MD, order_M, ctx.tokens, ctx.k).sum(1), None, None


class Combine(torch.autograd.Function):
    """The weighted sum over each token's choices, of which those that were dropped are missing."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        order_M: Tensor,
        weights_NK: Tensor,
    ) -> Tensor:
        """Return [N, D], in the dtype of the weights."""
        made_NKD = in_places(rows_MD, order_M, *weights_NK.shape)
        ctx.save_for_backward(made_NKD, order_M, weights_NK)
        return (made_NKD * weights_NK[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of the rows and of the weights."""
        made_NKD, order_M, weights_NK = ctx.saved_tensors
        tokens_M, weights_M = order_M // weights_NK.shape[1], weights_NK.flatten()[order_M]
        of_rows_MD = gradient_ND.index_select(0, tokens_M).mul_(weights_M[:, None])
        of_weights_NK = (made_NKD * gradient_ND[:, None]).sum(-1)
        return of_rows_MD.to(made_NKD.dtype), None, of_weights_NK


def in_places(
    rows_MD: Tensor,
    order_M: Tensor,
    tokens: int,
    k: int,
) -> Tensor:
    """Return rows at the places [N, K, D] that an order names, and zeros where there is none."""
    width = rows_MD.shape[1]
    places = rows_MD.new_zeros(tokens * k, width).index_copy_(0, order_M, rows_MD)
    return places.view(tokens, k, width)
