"""What a rank holds of a parameter: one record, read by clipping, checkpoints and optimizer states alike.

weight [4, 6]     0 1 2 3 4 5 6 7 8 9 │ 10 11 12 13 14 15 16 │ 17 ... 23
                       rank 0         │  rank 1: start 10,   │  rank 2
                                      │          stop 17     │
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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


def refuse_optimizers(parameters: Iterable[nn.Parameter], strategy: str) -> None:
    """Raise if an optimizer has been built over parameters that a strategy shards: it would update them in vain.

    Raises
    ------
    ValueError
        Naming the optimizer.
    """
    ours = list(parameters)
    if _optimizers_over(ours):
        gc.collect()  # it may be garbage that nobody has collected yet
    for kind in _optimizers_over(ours):
        raise ValueError(
            f"a {kind} was built over parameters that {strategy} shards, and would update them in vain: first wrap the "
            f"model, then build the optimizer with its method, model.optimizer({kind}, ...)"
        )


def _optimizers_over(parameters: list[nn.Parameter]) -> list[str]:
    """Return the kinds of all optimizers over some of these: who refers to a list of groups with such parameters.

    Only what leads there is looked at: to hold all objects that exist, if only for a moment, disturbs other threads.
    """
    lists = _referring(parameters, list)
    groups = [group for group in _referring(lists, dict) if "params" in group]
    holders = _referring(_referring(groups, list), object)
    holders += _referring([holder for holder in holders if isinstance(holder, dict)], object)  # of their attributes
    return [type(holder).__name__ for holder in holders if isinstance(holder, torch.optim.Optimizer)]


def _referring(objects: list[Any], kind: type) -> list[Any]:
    return [referrer for referrer in gc.get_referrers(*objects) if isinstance(referrer, kind)] if objects else []
