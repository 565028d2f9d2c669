"""Gradient clipping by the global norm (Pascanu, Mikolov & Bengio 2013, algorithm 1)."""

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.placement import counts, expert_groups_of, placement_of


def clip_by_global_norm(parameters: Iterable[nn.Parameter], limit: float, *axes: Communicator) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; return the norm before, a scalar tensor.

    With plain data parallelism every rank holds all gradients, and finds the same norm without a message. With slices
    (ZeRO), and with experts that ranks have shared out, the squares of all ranks are added. Pass the `axes` along which
    ranks hold other parameters, those of tensor parallelism and of the pipeline: their squares are added, too. What
    several ranks hold, only the first counts.

    The norm is computed in float32 at least, since in float16 it would overflow at 65,504. If it is infinite or not a
    number, the gradients stay as they are: no scale could mend them, and the caller should skip the step. With a
    `limit` of 0 or infinity the norm is only measured.

    Cost: an all-reduce of one number for the slices, and one for each axis of several ranks; then it is collective.

    Raises
    ------
    ValueError
        If `limit` is negative or not a number.
    """
    if not limit >= 0:
        raise ValueError(f"limit={limit} is no bound for a norm: give a positive number, or 0 for none")
    by_axes: dict[tuple[Communicator, ...], list[nn.Parameter]] = defaultdict(list)  # along which others have more
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            placement, groups = placement_of(parameter), expert_groups_of(parameter)
            ranks = (*((placement.comm,) if placement else ()), *((groups.ep,) if groups else ()))
            by_axes[ranks].append(parameter)
    gradients = [p.grad for several in by_axes.values() for p in several if p.grad is not None]
    axes = tuple(comm for comm in axes if comm.size > 1)
    # From parameters, not gradients: a frozen stage has none of these, but must send the same dtype as the others.
    dtype = reduce(torch.promote_types, {parameter.dtype for parameter in parameters}, torch.float32)
    like = [*gradients, *parameters]
    nothing = like[0].new_zeros((), dtype=dtype) if like else torch.zeros((), dtype=dtype)
    norm = _joint([_norm(several, ranks, nothing) for ranks, several in by_axes.items()], nothing)
    norm = reduce(_over_ranks, axes, norm)
    if 0 < limit < float("inf") and gradients:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        torch._foreach_mul_(gradients, torch.where(norm.isfinite(), scale, 1.0))  # an `if` would wait for the GPU
    return norm


def _norm(parameters: list[nn.Parameter], axes: tuple[Communicator, ...], nothing: Tensor) -> Tensor:
    """Return the joint norm of the gradients that count here, and of those of the other ranks along `axes`."""
    gradients = [p.grad for p in parameters if p.grad is not None and counts(p)]
    norm = _joint(list(torch._foreach_norm(gradients, 2, dtype=nothing.dtype)) if gradients else [], nothing)
    return reduce(_over_ranks, (comm for comm in axes if comm.size > 1), norm)


def _joint(norms: list[Tensor], nothing: Tensor) -> Tensor:
    """Return the joint norm of parts with these norms; `nothing` if there are none."""
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else nothing


def _over_ranks(norm: Tensor, comm: Communicator) -> Tensor:
    """Return the joint norm of the parts of all ranks: one all-reduce of one number."""
    square = norm.square()
    all_reduce(square, comm)
    return square.sqrt()
