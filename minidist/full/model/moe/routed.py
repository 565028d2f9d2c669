"""The layer of routed experts: route, find room, hang the losses on, send and combine.

    x [B, T, D] ──▶ router ──▶ scores [B, T, E] ──▶ the k best: choice, weights [B, T, K] ────────────┐
                └─▶ k copies of each token, sorted by expert ─▶ experts ─▶ sorted back ─▶ weighted sum ─▶ [B, T, D]

Sources: Shazeer et al. 2017; Fedus et al. 2021 (Switch), sections 2.1 and 2.2; Jiang et al. 2024
(Mixtral); Wang et al. 2024 (bias); DeepSeek-AI 2024 (V3), section 2.1.2.
"""

import torch
from torch import Tensor, nn

from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import ORIGIN, Where
from minidist.full.model.mlp import MLP, sizes
from minidist.full.model.moe.capacity import Sum, choices_with_room
from minidist.full.model.moe.combine import Compute, combine
from minidist.full.model.moe.experts import Experts
from minidist.full.model.moe.losses import Attach, losses_and_tally
from minidist.full.model.moe.router import choose, router_logits, scores_of, weights_of


class MoE(nn.Module):
    """Takes the place of an MLP: routed experts, and perhaps some that every token goes through."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.routed = RoutedExperts(config, index)
        inside = config.shared_experts * config.intermediate
        self.shared = MLP(sizes(config, intermediate=inside)) if inside else None

    def forward(self, x: Tensor, where: Where = ORIGIN) -> Tensor:
        """Map every position of `x` [B, T, D]; `where` gives their positions."""
        found: Tensor = self.routed(x, where)
        return found if self.shared is None else found + self.shared(x)


class RoutedExperts(nn.Module):
    """The router, and the experts that it chooses from.

    Attributes
    ----------
    compute : Compute or None
        What a strategy that spreads the experts over ranks has computed in their place; None:
        `experts`, here.
    sum_over_sequence : Sum
        Sums over the ranks that have other tokens of the same sequences. A strategy that splits
        sequences replaces it.
    bias : Tensor
        Each expert's bias, counted in changes of `balance_rate`: int64 [E], so that any layout has
        the same bits.
    tally : Tensor
        Counts since the last `rebalance`: choices of each expert, dropped choices, tokens, their
        entropy; float64 [E + 3].
    """

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.router = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.experts = Experts(config.experts, config.hidden, config.intermediate)
        self.compute: Compute | None = None
        self.sum_over_sequence: Sum = alone
        self.bias = torch.zeros(config.experts, dtype=torch.int64, device="cpu")
        self.tally = torch.zeros(config.experts + 3, dtype=torch.float64, device="cpu")

    def forward(self, x_BTD: Tensor, where: Where = ORIGIN) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token."""
        config = self.config
        logits_BTE = router_logits(x_BTD, self.router)
        scores_BTE = scores_of(logits_BTE, config.scores)
        choice_BTK = self.choose(scores_BTE)
        weights_BTK = weights_of(scores_BTE, choice_BTK, config.raw_weights)
        kept_BTK = self.kept(choice_BTK, where)
        if torch.is_grad_enabled() and self.router.requires_grad:
            loss, tally = losses_and_tally(
                logits_BTE, scores_BTE, choice_BTK, kept_BTK, config, self.sum_over_sequence
            )
            weights_BTK = Attach.apply(weights_BTK, where.weight * loss, self, tally)  # type: ignore[no-untyped-call]
        choice_BTK = choice_BTK.masked_fill(~kept_BTK, config.experts)
        compute = self.compute or self.experts
        return combine(x_BTD, choice_BTK, weights_BTK, compute, config.experts)

    def choose(self, scores_BTE: Tensor) -> Tensor:
        """Return the k experts of each token, after the bias."""
        return choose(
            scores_BTE,
            self.bias * self.config.balance_rate,
            self.config.top_k,
        )

    def kept(self, choice_BTK: Tensor, where: Where) -> Tensor:
        """Return which choices have room."""
        return choices_with_room(
            choice_BTK,
            where,
            self.config,
            self.sum_over_sequence,
        )

    def get_extra_state(self) -> Tensor:
        """Return what a `state_dict` keeps beside the parameters: the bias."""
        return self.bias

    def set_extra_state(self, state: Tensor) -> None:
        """Take the bias from a `state_dict`."""
        self.bias = state.clone()


def alone(mine: Tensor) -> Tensor:
    """Return the sum over one rank. (It has a name, as a model with a lambda in it could not be
    pickled.)
    """
    return mine


def sum_over(layer: RoutedExperts, total: Sum) -> None:
    """Let a layer sum over more ranks, too: those that `total` sums over have other tokens of its
    sequences.
    """
    before = layer.sum_over_sequence
    layer.sum_over_sequence = lambda mine: total(before(mine))


def routed_in(model: nn.Module) -> list[RoutedExperts]:
    """Return the layers of routed experts in a model."""
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]
