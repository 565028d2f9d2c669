"""Mixture of experts: a router sends each token to the k best of E experts.

    x [B, T, D] ──┬─▶ router ─▶ scores [B, T, E] ─▶ the k best: choice, weights [B, T, k] ───────────┐
                  └─▶ k copies of each token, sorted by expert ─▶ experts ─▶ sorted back ─▶ weighted sum ─▶ [B, T, D]

The router computes in float32: in 16 bits it would choose another expert for some tokens in a
hundred. Of equal scores the first expert wins. The gradient of the router comes through the weights
alone, as a choice has none: so the weights multiply the outputs, and a softmax over the chosen one
alone (k = 1), which is always 1, would teach it nothing.

Left alone, a router soon sends most tokens to a few experts. Two remedies:

    aux     a loss E sum_e f_e P_e of each sequence: f_e of its k T choices fall on expert e, whose share in the scores
            is P_e on average. It is smallest when all are equal. Gradients pass through P_e.
    bias    each expert has a number that is added to its scores for choosing, and for nothing else. After each step it
            rises by a constant where the expert had fewer tokens than the mean, and falls where it
            had more.

An auxiliary loss over the tokens that a microbatch or a rank happens to have would depend on the
layout, and so would a capacity that is shared by them. Here both belong to a sequence: in each, an
expert serves the first `capacity` tokens. What is counted is counted in backward, once for each
token that trains: not in evaluation, nor when a forward is computed again.

Sources: Shazeer et al. 2017; Fedus et al. 2021 (Switch), sections 2.1 and 2.2; Jiang et al. 2024
(Mixtral); Zoph et al. 2022 (z-loss); Wang et al. 2024 (bias); DeepSeek-AI 2024 (V3), section 2.1.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from minidist.model.config import GPTConfig
from minidist.model.dropout import ORIGIN, Where
from minidist.model.experts import Counts, Experts
from minidist.model.mlp import MLP

Compute: TypeAlias = Callable[[Tensor, Counts], Tensor]
"""Maps rows [M, D], sorted by expert, to what the experts make of them [M, D]; the counts are of
all E experts.
"""

Sum: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over the ranks that matter; on one rank the tensor itself."""


class MoE(nn.Module):
    """Takes the place of an MLP: routed experts, and perhaps some that every token goes through."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.routed = RoutedExperts(config, index)
        shared = config.shared_experts * config.intermediate
        self.shared = MLP(config.hidden, shared) if shared else None

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
    whole : Sum
        Over the ranks that have other tokens of the same sequences. A strategy that splits
        sequences replaces it.
    bias : Tensor
        Of each expert, counted in changes of `balance_rate`: int64 [E], so that any layout has the
        same bits.
    tally : Tensor
        Since the last `rebalance`: choices of each expert, dropped choices, tokens, their entropy;
        float64 [E + 3].
    """

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.router = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.experts = Experts(config.experts, config.hidden, config.intermediate)
        self.compute: Compute | None = None
        self.whole: Sum = lambda mine: mine
        self.bias = torch.zeros(config.experts, dtype=torch.int64, device="cpu")
        self.tally = torch.zeros(config.experts + 3, dtype=torch.float64, device="cpu")

    def forward(self, x: Tensor, where: Where = ORIGIN) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token of `x` [B, T,
        D].
        """
        logits = self.logits(x)  # [B, T, E]
        scores = logits.softmax(-1) if self.config.scores == "softmax" else logits.sigmoid()
        choice = self.choose(scores)  # [B, T, k]
        weights = scores.gather(-1, choice)
        if not self.config.raw_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        kept = self.kept(choice, where)
        if torch.is_grad_enabled() and self.router.requires_grad:
            weights = self.with_losses(weights, logits, scores, choice, kept, where)
        return self.combine(x, choice.masked_fill(~kept, self.config.experts), weights)

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's products [B, T, E], in float32 at least, also under autocast."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
            return x.to(wide) @ self.router.to(wide).T

    def choose(self, scores: Tensor) -> Tensor:
        """Return the k experts with the best scores [B, T, E], after the bias: [B, T, k]."""
        biased = scores.detach() + self.bias.to(scores.device) * self.config.balance_rate
        return biased.sort(stable=True, dim=-1, descending=True).indices[..., : self.config.top_k]

    def kept(self, choice: Tensor, where: Where) -> Tensor:
        """Return which choices [B, T, k] have room: in each sequence the first ones of each
        expert.
        """
        if not (factor := self.config.capacity):
            return torch.ones_like(choice, dtype=torch.bool)
        rows, time, k = choice.shape
        positions = where.position_numbers(time, choice.device)
        sequence = choice.new_zeros(rows, self.config.sequence, k)
        sequence[:, positions] = choice + 1  # 0: no token
        sequence = self.whole(sequence)
        chosen = (
            sequence[..., None] == torch.arange(1, self.config.experts + 1, device=choice.device)
        ).any(2)
        # [B, T, E]: how many tokens before this one chose the expert
        earlier = chosen.cumsum(1) - chosen.long()
        tokens = (sequence[:1, :, 0] > 0).sum().double()
        return (
            earlier[:, positions].gather(-1, choice)
            < (factor * k * tokens / self.config.experts).ceil()
        )

    def with_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        choice: Tensor,
        kept: Tensor,
        where: Where,
    ) -> Tensor:
        """Return the weights, from which backward goes on to the losses of the router, and tallies
        this forward.
        """
        config, experts = self.config, self.config.experts
        shares = scores / scores.sum(-1, keepdim=True)  # [B, T, E]
        chosen = nn.functional.one_hot(choice, experts).sum(2)  # [B, T, E]
        loss = config.z_loss * logits.logsumexp(-1).square().sum()
        if config.balance == "aux":
            loss = loss + config.balance_rate * balance_loss(shares, chosen, self.whole)
        dropped, entropy = (~kept).sum(), torch.special.entr(shares.detach()).sum()
        counted = (chosen.sum((0, 1)), dropped, choice.new_tensor(choice[..., 0].numel()), entropy)
        new = torch.cat([count.double().flatten() for count in counted])
        return Attach.apply(weights, where.weight * loss, self, new)  # type: ignore[no-any-return, no-untyped-call]

    def combine(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """Send the tokens of `x` to their experts, E standing for none, and add up what comes back,
        weighted.

        Rows go back to their places before they are added up, in float32 at least: a sum in the
        order of arrival would not repeat.
        """
        experts, k = self.config.experts, choice.shape[-1]
        order = choice.flatten().argsort(stable=True)
        if x.is_meta:  # nobody knows who is chosen: all alike
            counts = [len(part) for part in torch.tensor_split(torch.empty(len(order)), experts)]
        else:
            counts = choice.flatten().bincount(minlength=experts + 1)[:experts].tolist()
        order = order[: sum(counts)]
        rows: Tensor = Pick.apply(x.flatten(0, 1), order, k)  # type: ignore[no-untyped-call]
        made = (self.compute or self.experts)(rows, counts)
        total: Tensor = Combine.apply(made, order, weights.flatten(0, 1))  # type: ignore[no-untyped-call]
        return total.view(x.shape).to(x.dtype)

    def get_extra_state(self) -> Tensor:
        """Return what a `state_dict` keeps beside the parameters: the bias."""
        return self.bias

    def set_extra_state(self, state: Tensor) -> None:
        """Take the bias from a `state_dict`."""
        self.bias = state.clone()


class Pick(torch.autograd.Function):
    """The tokens whose choices an order names; backward adds up the gradients of a token's choices,
    in their order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        """Return rows [M, D] of tokens `x` [N, D]; choice j of token n has the number n k + j in
        `order` [M].
        """
        ctx.save_for_backward(order)
        ctx.k, ctx.tokens = k, len(x)
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the tokens."""
        (order,) = ctx.saved_tensors
        return placed(gradient, order, ctx.tokens, ctx.k).sum(1), None, None


class Combine(torch.autograd.Function):
    """The weighted sum over each token's choices, of which those that were dropped are missing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Return [N, D] of rows [M, D], which come in this order, and weights [N, k], in the dtype
        of these.
        """
        back = placed(rows, order, *weights.shape)
        ctx.save_for_backward(back, order, weights)
        return (back * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of the rows and of the weights."""
        back, order, weights = ctx.saved_tensors
        k = weights.shape[1]
        of_rows = gradient.index_select(0, order // k).mul_(weights.flatten()[order, None])
        return of_rows.to(back.dtype), None, (back * gradient[:, None]).sum(-1)


def placed(rows: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Return rows [M, D] at the places [N, k, D] that an order names, and zeros where there is
    none.
    """
    places = rows.new_zeros(tokens * k, rows.shape[1]).index_copy_(0, order, rows)
    return places.view(tokens, k, rows.shape[1])


class Attach(torch.autograd.Function):
    """The identity of the weights, whose backward adds the gradient of a loss, and to the tally of
    its layer.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, loss: Tensor, layer: RoutedExperts, new: Tensor
    ) -> Tensor:
        """Return the weights."""
        ctx.layer, ctx.new, ctx.loss = layer, new, torch.ones_like(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradient of the weights, and that of a loss: 1."""
        if not ctx.new.is_meta:
            ctx.layer.tally = ctx.layer.tally.to(ctx.new.device) + ctx.new
        return gradient, ctx.loss, None, None


def balance_loss(shares: Tensor, chosen: Tensor, whole: Sum) -> Tensor:
    """Return the sum over tokens of E sum_e f_e p_e, p being the `shares` [B, T, E] of one token in
    the scores.

    `chosen` [B, T, E] says whether a token goes to an expert. In a sequence the mean of this is E
    sum_e f_e P_e.
    """
    counts = whole(chosen.sum(1))  # [B, E], of whole sequences
    fractions = shares.shape[-1] * counts.to(shares.dtype) / counts.sum(-1, keepdim=True)
    return (fractions * shares.sum(1)).sum()


class Load(NamedTuple):
    """How evenly a step has loaded the experts.

    Attributes
    ----------
    imbalance : float
        Tokens of the busiest expert over the mean, on average over the layers: 1 if all have as
        many.
    dropped : int
        Choices that found no room.
    entropy : float
        Of a token's scores, in nats, on average; at most ln E.
    """

    imbalance: float
    dropped: int
    entropy: float


def sum_over(layer: RoutedExperts, total: Sum) -> None:
    """Let `layer.whole` sum over more ranks, too: those that `total` sums over have other tokens of
    its sequences.
    """
    before = layer.whole
    layer.whole = lambda mine: total(before(mine))


def routed_in(model: nn.Module) -> list[RoutedExperts]:
    """Return the layers of routed experts in a model."""
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def rebalance(model: nn.Module, total: Sum = lambda mine: mine) -> Load | None:
    """Move each bias by one change, and begin a new tally. Call it once a step, after the last
    backward.

    Parameters
    ----------
    total : Sum
        Over the ranks that share the step; of a table of all layers, float64 [L, E + 3].

    Returns
    -------
    Load or None
        None if no router was trained in this step.
    """
    if not (routed := routed_in(model)) or routed[0].router.is_meta:
        return None
    config = routed[0].config
    table = torch.zeros(
        config.layers, config.experts + 3, dtype=torch.float64, device=routed[0].router.device
    )
    for layer in routed:
        table[layer.index] = layer.tally
        layer.tally = torch.zeros_like(layer.tally)
    table = total(table).cpu()
    for layer in routed:
        if config.balance == "bias":
            counts = table[layer.index, : config.experts]
            layer.bias += (counts.mean() - counts).sign().long()
    counted = table[table[:, -2] > 0]  # not the layers whose router is frozen
    if not len(counted):
        return None
    counts, (dropped, tokens, entropy) = (
        counted[:, : config.experts],
        counted[:, config.experts :].sum(0).tolist(),
    )
    return Load(float((counts.amax(1) / counts.mean(1)).mean()), int(dropped), entropy / tokens)
