"""A mixture of experts: each expert computes the tokens that chose it.

    x [N, D] ──▶ router ──▶ scores [N, E] ──▶ the k best: choice, weights [N, K]
                                              output = sum over its k experts of weight * expert(x)

A token costs k experts' work, however many experts there are: the model has E/k times the
parameters for the same work. Choosing has no gradient, so the router learns only through the
weights that multiply the outputs. (Shazeer et al. 2017; Fedus et al. 2021, Switch, section 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def mixture(
    x_ND: Tensor,
    router_ED: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    k: int,
    bias_E: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the output [N, D], and how many tokens chose each expert [E].

    `bias_E` is added to the scores for choosing, and for nothing else. Nothing is dropped.
    """
    choice_NK, weights_NK = route(x_ND, router_ED, k, bias_E)
    output_ND = torch.zeros_like(x_ND)
    counts_E = choice_NK.flatten().bincount(minlength=len(experts))
    for number, expert in enumerate(experts):
        token, place = (choice_NK == number).nonzero(as_tuple=True)
        made = expert(x_ND[token])
        output_ND.index_add_(0, token, weights_NK[token, place, None] * made)
    return output_ND, counts_E


def route(
    x_ND: Tensor, router_ED: Tensor, k: int, bias_E: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return each token's k experts [N, K], and their weights [N, K], which add up to 1."""
    scores_NE = (x_ND @ router_ED.T).softmax(-1)
    choice_NK = (scores_NE + bias_E).topk(k).indices
    weights_NK = scores_NE.gather(-1, choice_NK)
    return choice_NK, weights_NK / weights_NK.sum(-1, keepdim=True)


def balance_loss(scores_NE: Tensor, counts_E: Tensor) -> Tensor:
    """Return E Σ f_e P_e of a sequence, which is 1 if all experts are chosen equally often.

    f_e is the share of choices that fall on expert e, P_e its mean score. (Switch, section 2.2.)
    """
    fractions_E = counts_E / counts_E.sum()
    means_E = scores_NE.mean(0)
    return len(counts_E) * (fractions_E * means_E).sum()


def rebalance(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Raise the bias of experts with fewer tokens than the mean, and lower that of the others.

    (Wang et al. 2024, algorithm 1.)
    """
    missing_E = counts_E.double().mean() - counts_E
    bias_E += rate * missing_E.sign()
