"""The router: scores of all experts, the k best, and the weights of what they will make.

Choosing has no gradient, so the router learns only through the weights that multiply the outputs.
With k = 1 a softmax over the chosen expert is always 1: the router would learn nothing. So the
softmax goes over all E, and `raw_weights` takes scores as they are.

It computes in float32: in 16 bits it would choose another expert for some tokens in a hundred. Of
equal scores the first expert wins.
"""

import torch
from torch import Tensor


def router_logits(x_BTD: Tensor, router_ED: Tensor) -> Tensor:
    """Return the products of tokens and router [B, T, E], in float32 at least, also under
    autocast.
    """
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    with torch.autocast("cuda" if x_BTD.is_cuda else "cpu", enabled=False):
        return x_BTD.to(wide) @ router_ED.to(wide).T


def scores_of(logits_BTE: Tensor, kind: str) -> Tensor:
    """Return the experts' scores [B, T, E]: "softmax" over all of them, or "sigmoid" of each."""
    return logits_BTE.softmax(-1) if kind == "softmax" else logits_BTE.sigmoid()


def choose(scores_BTE: Tensor, bias_E: Tensor, k: int) -> Tensor:
    """Return the k experts [B, T, K] whose scores are best after the bias, best first."""
    biased_BTE = scores_BTE.detach() + bias_E.to(scores_BTE.device)
    ranked_BTE = biased_BTE.sort(stable=True, dim=-1, descending=True).indices
    return ranked_BTE[..., :k]


def weights_of(scores_BTE: Tensor, choice_BTK: Tensor, raw: bool) -> Tensor:
    """Return the chosen scores [B, T, K], which add up to 1 for each token unless they are
    `raw`.
    """
    chosen_BTK = scores_BTE.gather(-1, choice_BTK)
    return chosen_BTK if raw else chosen_BTK / chosen_BTK.sum(-1, keepdim=True)
