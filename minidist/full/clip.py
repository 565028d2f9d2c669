"""Gradient clipping by the global norm (Pascanu, Mikolov & Bengio 2013, algorithm 1)."""

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.fsdp.access.linked import updated
from minidist.full.placement import placement_of


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], limit: float, *axes: Communicator
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`.

    Return the norm before, a scalar tensor.

    With plain data parallelism every rank holds all gradients, and finds the same norm without a
    message. Where ranks hold slices (ZeRO, whether `parameters` are these or the model's own),
    blocks (tensor parallelism) or other experts, the records say so, and the squares of all ranks
    are added, and so are those of the stages of a pipeline; what several ranks hold, only the first
    counts. In a loop of your own, pass in `axes` what no record can know: along which other axes
    ranks hold other parameters. An axis that the records name is not counted twice.

    The norm is computed in float32 at least, since in float16 it would overflow at 65,504. If it is
    infinite or not a number, the gradients stay as they are: no scale could mend them, and the
    caller should skip the step. With a `limit` of 0 or infinity the norm is only measured.

    Cost: an all-reduce of one number for each axis of several ranks; then it is collective.
    (torch's own `clip_grad_norm_` finds the same norm, by one all-reduce for each gradient; see
    `gradient.py`.)

    Raises
    ------
    ValueError
        If `limit` is negative or not a number, or if an axis has some, but not all, of the ranks
        that share a parameter and others besides.
    """
    if not limit >= 0:
        raise ValueError(
            f"limit={limit} is no bound for a norm: give a positive number, or 0 for none"
        )
    # parameters, by the axes along which other ranks hold other parts of them
    by_axes: dict[tuple[Communicator, ...], list[nn.Parameter]] = defaultdict(list)
    parameters = [updated(parameter) for parameter in parameters]
    for parameter in parameters:
        if parameter.requires_grad or parameter.grad is not None:
            by_axes[placement_of(parameter).axes].append(parameter)
    gradients = [p.grad for several in by_axes.values() for p in several if p.grad is not None]
    # From parameters, not gradients: a frozen stage has none of these, but must send the same dtype
    # as the others.
    dtype = reduce(
        torch.promote_types, {parameter.dtype for parameter in parameters}, torch.float32
    )
    like = [*gradients, *parameters]
    nothing = like[0].new_zeros((), dtype=dtype) if like else torch.zeros((), dtype=dtype)
    norm = _joint([_norm(several, ranks, nothing) for ranks, several in by_axes.items()], nothing)
    stages = [
        comm for parameter in parameters if (comm := placement_of(parameter).stages) is not None
    ]
    across = {comm.members: comm for comm in (*axes, *stages) if comm.size > 1}
    norm = reduce(
        _over_ranks, [comm for comm in across.values() if not _recorded(comm, parameters)], norm
    )
    if 0 < limit < float("inf") and gradients:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        # an `if` would wait for the GPU
        torch._foreach_mul_(gradients, torch.where(norm.isfinite(), scale, 1.0))
    return norm


def _recorded(axis: Communicator, parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether the parameters' own records name an axis.

    It would be counted twice. Raises ValueError as above.
    """
    mine = set(axis.members)
    for comm in {comm for parameter in parameters for comm in placement_of(parameter).axes}:
        if mine <= set(comm.members):
            return True
        if len(mine & set(comm.members)) > 1:
            fault = (
                f"the ranks {list(axis.members)} would count twice what {list(comm.members)} "
                "share already"
            )
            raise ValueError(
                f"{fault}, as the parameters record: pass only the axis of the pipeline, or none"
            )
    return False


def _norm(
    parameters: list[nn.Parameter], axes: tuple[Communicator, ...], nothing: Tensor
) -> Tensor:
    """Return the joint norm of the gradients that count here, and of those of the other ranks along
    `axes`.
    """
    # this rank's alone
    parts = [(p, p.grad.as_subclass(Tensor)) for p in parameters if p.grad is not None]
    gradients = [gradient for parameter, gradient in parts if placement_of(parameter).counts]
    norm = _joint(
        list(torch._foreach_norm(gradients, 2, dtype=nothing.dtype)) if gradients else [], nothing
    )
    return reduce(_over_ranks, axes, norm)


def _joint(norms: list[Tensor], nothing: Tensor) -> Tensor:
    """Return the joint norm of parts with these norms; `nothing` if there are none."""
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else nothing


def _over_ranks(norm: Tensor, comm: Communicator) -> Tensor:
    """Return the joint norm of the parts of all ranks: one all-reduce of one number."""
    square = norm.square()
    all_reduce(square, comm)
    return square.sqrt()
