"""The router's own losses, and how they reach backward without being returned.

    balance   E sum_e f_e P_e of each sequence: f_e of its k T choices fall on expert e, whose share in the scores is
              P_e on average. It is smallest when all are equal. f_e is counted and has no gradient; P_e has.
    z         the square of the logits' logsumexp, which keeps them small

A loss over the tokens that a microbatch or a rank happens to have would depend on the layout: here
it belongs to a sequence. It is hung on the weights, as nothing around the layer (stages,
recomputation, wrappers) then has to hand it on. What is counted is counted in backward, once for
each token that trains: not in evaluation, nor when a forward is computed again.

Sources: Fedus et al. 2021 (Switch), section 2.2; Zoph et al. 2022 (z-loss); DeepSeek-AI 2024 (V3),
section 2.1.2 (balance within a sequence).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from minidist.full.model.config import GPTConfig
from minidist.full.model.moe.capacity import Sum


class Tallied(Protocol):
    """A layer that counts what it routes: choices of each expert, dropped choices, tokens, their
    entropy; float64 [E + 3].
    """

    tally: Tensor


def losses_and_tally(
    logits_BTE: Tensor,
    scores_BTE: Tensor,
    choice_BTK: Tensor,
    kept_BTK: Tensor,
    config: GPTConfig,
    sum_over_sequence: Sum,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the router's losses over all tokens, and what they add to the tally."""
    shares_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    chosen_BTE = one_hot(choice_BTK, config.experts).sum(2)
    loss = config.z_loss * logits_BTE.logsumexp(-1).square().sum()
    if config.balance == "aux":
        balance = balance_loss(shares_BTE, chosen_BTE, sum_over_sequence)
        loss = loss + config.balance_rate * balance
    counted = (
        chosen_BTE.sum((0, 1)),
        (~kept_BTK).sum(),
        choice_BTK.new_tensor(choice_BTK[..., 0].numel()),
        torch.special.entr(shares_BTE.detach()).sum(),
    )
    return loss, torch.cat([count.double().flatten() for count in counted])


def balance_loss(shares_BTE: Tensor, chosen_BTE: Tensor, sum_over_sequence: Sum) -> Tensor:
    """Return the sum over tokens of E sum_e f_e p_e, p being a token's shares in the scores.

    `chosen_BTE` says whether a token goes to an expert. In a sequence the mean of this is E sum_e
    f_e P_e.
    """
    counts_BE = sum_over_sequence(chosen_BTE.sum(1))  # of whole sequences
    experts = shares_BTE.shape[-1]
    fractions_BE = experts * counts_BE.to(shares_BTE.dtype) / counts_BE.sum(-1, keepdim=True)
    return (fractions_BE * shares_BTE.sum(1)).sum()


class Attach(torch.autograd.Function):
    """The identity of the weights, whose backward adds the gradient of a loss, and to the tally of
    its layer.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, layer: Tallied, new: Tensor) -> Tensor:
        """Return the weights."""
        ctx.layer, ctx.new, ctx.loss = layer, new, torch.ones_like(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradient of the weights, and that of a loss: 1."""
        if not ctx.new.is_meta:
            ctx.layer.tally = ctx.layer.tally.to(ctx.new.device) + ctx.new
        return gradient, ctx.loss, None, None
