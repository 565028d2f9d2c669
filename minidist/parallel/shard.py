"""A rank's part of several parameters laid end to end: neighbouring elements, whatever parameters they belong to.

parameters         embedding │ norm │ query ......│ key │ value
on three ranks     ─ shard 0 ──────│── shard 1 ──────│─ shard 2 ─
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives.fast import cut
from minidist.comm import Communicator
from minidist.parallel.optimizer_state import share_out
from minidist.parallel.placement import Placement, make_slice


class Shard:
    """This rank's part of `parameters`.

    Attributes
    ----------
    counts : list[int]
        The elements of each rank's part.
    start, stop : int
        This rank's.
    slices : dict[nn.Parameter, nn.Parameter]
        The piece of `values` that belongs to each parameter; empty for most. What the optimizer updates.
    """

    def __init__(self, parameters: list[nn.Parameter], names: dict[nn.Parameter, str], comm: Communicator) -> None:
        self.parameters, self.comm = parameters, comm
        self.gradient: Tensor | None = None  # reduced, of this rank's elements
        self.placements: dict[nn.Parameter, Placement] = {}
        self.held: dict[nn.Parameter, slice] = {}  # which of this rank's elements belong to a parameter
        self.counts = cut(sum(parameter.numel() for parameter in parameters), comm.size)
        self.start = sum(self.counts[: comm.rank])
        self.stop = self.start + self.counts[comm.rank]
        self.slices: dict[nn.Parameter, nn.Parameter] = {}
        offset = 0  # of the parameter among all elements
        for parameter in parameters:
            first, last = (min(max(end - offset, 0), parameter.numel()) for end in (self.start, self.stop))
            begin = max(offset - self.start, 0)
            self.held[parameter] = slice(begin, begin + last - first)
            self.placements[parameter] = Placement(names[parameter], parameter.shape, first, last, comm)
            offset += parameter.numel()

    def make_slices(self, values: Tensor) -> None:
        """Let `values`, this rank's elements, be what the optimizer updates."""
        self.slices = {p: make_slice(values[self.held[p]], self.placements[p], p) for p in self.parameters}

    def give_gradient(self, without: set[nn.Parameter]) -> None:
        """Give each slice its piece of the gradient, or None where the parameter was not used."""
        for parameter, piece in self.slices.items():
            used = self.gradient is not None and parameter not in without
            piece.grad = self.gradient[self.held[parameter]] if used else None  # type: ignore[index]


class Sharded(ABC):
    """What strategies share that have a rank's optimizer update slices: how it is built, saved and loaded."""

    parameters_to_reduce: list[nn.Parameter]

    @abstractmethod
    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""

    @abstractmethod
    def stepped(self) -> None:
        """Take notice that the slices have new values."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""

    @property
    def slices(self) -> list[nn.Parameter]:
        """What this rank's optimizer updates: one slice for each trained parameter, in the model's order."""
        return [self.slice_of(parameter) for parameter in self.parameters_to_reduce]

    def optimizer(
        self, kind: type[torch.optim.Optimizer], groups: Iterable[dict[str, Any]] | None = None, **defaults: Any
    ) -> torch.optim.Optimizer:
        """Return an optimizer of this `kind` that holds state for this rank's slices only.

        Parameters
        ----------
        kind
            Any optimizer of torch that treats each element for itself, such as AdamW.
        groups : optional
            Parameter groups over the model's own parameters, as torch has them; frozen parameters are left out.
        defaults
            Arguments of `kind`.

        After its `step` all ranks have the new parameters. Its `state_dict()`, collective, is that of an unsharded
        optimizer, and `load_state_dict` takes one, whatever the number of ranks that wrote it.
        """
        trained = set(self.parameters_to_reduce)
        groups = [{"params": self.parameters_to_reduce}] if groups is None else groups
        sliced = [group | {"params": [self.slice_of(p) for p in group["params"] if p in trained]} for group in groups]
        optimizer = kind(sliced, **defaults)
        optimizer.register_step_post_hook(lambda *_: self.stepped())
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # the model's gradients are meant
        share_out(optimizer)
        return optimizer
