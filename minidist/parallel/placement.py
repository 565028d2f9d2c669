"""What a rank holds of a parameter: one record, read by clipping, checkpoints and optimizer states alike.

weight [4, 6]     0 1 2 3 4 5 6 7 8 9 │ 10 11 12 13 14 15 16 │ 17 ... 23
                       rank 0         │  rank 1: start 10,   │  rank 2
                                      │          stop 17     │
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm import Communicator


@dataclass(frozen=True)
class Placement:
    """Which elements of a parameter, flattened, this rank holds.

    Attributes
    ----------
    name, shape
        Of the whole parameter.
    start, stop : int
        This rank's elements; equal if it has none.
    comm : Communicator
        The ranks that share the parameter out among them.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    comm: Communicator


def make_slice(values: Tensor, placement: Placement) -> nn.Parameter:
    """Return a parameter, for an optimizer to update, that is these `values` (flat) and knows what they are."""
    piece = nn.Parameter(values)
    piece.placement = placement  # type: ignore[attr-defined]
    return piece


def placement_of(parameter: Tensor) -> Placement | None:
    """Return the record of a slice, or None for a parameter that is held whole."""
    return getattr(parameter, "placement", None)


def refuse_old_optimizers(parameters: Iterable[nn.Parameter], strategy: str) -> None:
    """Raise if an optimizer has been built over parameters that are about to be sharded: it would update nothing.

    Raises
    ------
    ValueError
        Naming the optimizer.
    """
    ours = {id(parameter) for parameter in parameters}
    for optimizer in (found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)):
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"a {type(optimizer).__name__} was built over these parameters before {strategy} sharded them, and "
                f"would hold the state of all of them: apply {strategy} first, then build the optimizer"
            )
