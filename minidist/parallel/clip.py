"""Gradient clipping by the global norm (Pascanu, Mikolov & Bengio 2013, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_by_global_norm(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; return the norm before, a scalar tensor.

    With data parallelism every rank holds the complete gradients, so each finds the same norm without a message.
    A `limit` of 0 or infinity only measures.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if 0 < limit < float("inf"):
        torch._foreach_mul_(gradients, (limit / (norm + 1e-12)).clamp(max=1.0))
    return norm
