"""Gradient clipping by the global norm (Pascanu, Mikolov & Bengio 2013, algorithm 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.placement import placement_of


def clip_by_global_norm(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; return the norm before, a scalar tensor.

    With data parallelism every rank holds the complete gradients, so each finds the same norm without a message. Of
    slices (see `Placement`) each rank adds the others' squares: one all-reduce of one number an axis. It is collective
    then. A `limit` of 0 or infinity only measures.

    The norm is computed in float32 at least: in float16 it would overflow at 65,504. If it is infinite or not a number,
    no scale could mend the gradients; they stay as they are, and the caller, who sees the norm, skips the step.

    Raises
    ------
    ValueError
        If `limit` is negative or not a number.
    """
    if not limit >= 0:
        raise ValueError(f"limit={limit} is no bound for a norm: give a positive number, or 0 for none")
    by_axis: dict[Communicator | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            placement = placement_of(parameter)
            by_axis[placement.comm if placement else None].append(parameter.grad)
    gradients = [gradient for several in by_axis.values() for gradient in several]
    if not gradients:
        return torch.zeros(())
    dtype = reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    norms = [_norm(several, comm, dtype) for comm, several in by_axis.items()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if 0 < limit < float("inf"):
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        torch._foreach_mul_(gradients, torch.where(norm.isfinite(), scale, 1.0))  # asking the value would stop a GPU
    return norm


def _norm(gradients: list[Tensor], comm: Communicator | None, dtype: torch.dtype) -> Tensor:
    """Return the joint norm of gradients, and of what the other ranks of `comm` hold of them."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)))
    if comm is None:
        return norm
    square = norm.square()
    all_reduce(square, comm)
    return square.sqrt()
