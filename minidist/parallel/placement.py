"""What a rank holds of a parameter: one record, read by clipping, checkpoints and optimizer states alike.

weight [4, 6]     0 1 2 3 4 5 6 7 8 9 │ 10 11 12 13 14 15 16 │ 17 ... 23
                       rank 0         │  rank 1: start 10,   │  rank 2
                                      │          stop 17     │
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


def mark_sharded(parameters: Iterable[nn.Parameter], strategy: str) -> None:
    """Have every optimizer over these parameters refuse to step: it would update them in vain. "" takes that back."""
    for parameter in parameters:
        parameter.sharded_by = strategy  # type: ignore[attr-defined]


def _refuse_sharded(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if strategy := getattr(parameter, "sharded_by", ""):
            kind = type(optimizer).__name__
            raise ValueError(
                f"a {kind} was built over parameters that {strategy} shards, and would update them in vain: first wrap "
                f"the model, then build the optimizer with its method, model.optimizer({kind}, ...)"
            )


register_optimizer_step_pre_hook(_refuse_sharded)  # of all optimizers: looking for them would mean to walk all objects
