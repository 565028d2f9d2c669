"""What a rank holds of a parameter: one record, read by clipping, checkpoints and optimizer states alike.

weight [4, 6]     0 1 2 3 4 5 6 7 8 9 │ 10 11 12 13 14 15 16 │ 17 ... 23
                       rank 0         │  rank 1: start 10,   │  rank 2
                                      │          stop 17     │
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.comm import Communicator

ONE_AT_A_TIME = threading.Lock()  # who looks at all objects keeps them alive, those of ranks in other threads too


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
    with ONE_AT_A_TIME:
        if _optimizers_over(ours):
            gc.collect()  # it may be garbage that nobody has collected yet
        found = _optimizers_over(ours)
    for kind in found:
        raise ValueError(
            f"a {kind} was built over these parameters before {strategy} sharded them, and would hold the state of all "
            f"of them: apply {strategy} first, then build the optimizer"
        )


def _optimizers_over(ids: set[int]) -> list[str]:
    """Return the kinds of all optimizers that exist over parameters of these ids."""
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
    return [
        type(optimizer).__name__
        for optimizer in optimizers
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
    ]
