"""A rank's part of several parameters that are laid end to end: neighbouring elements, of one
parameter or more.

parameters         embedding │ norm │ query ......│ key │ value
on three ranks     ─ shard 0 ──────│── shard 1 ──────│─ shard 2 ─
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.collectives.fast import cut
from minidist.comm import Communicator
from minidist.parallel.data.strategy import DataParallel
from minidist.parallel.freed import FreedParameter, freed
from minidist.parallel.optimizer.elementwise import build_over_slices, check_elementwise
from minidist.parallel.optimizer.groups import chosen, known_groups
from minidist.parallel.optimizer.guard import Guard
from minidist.parallel.optimizer.state import share_out
from minidist.parallel.placement import Placement, make_slice, with_gradient_of
from minidist.parallel.replica import Optimizer


class Shard:
    """This rank's part of `parameters`.

    Attributes
    ----------
    counts : list[int]
        The elements of each rank's part.
    start, stop : int
        This rank's.
    slices : dict[nn.Parameter, nn.Parameter]
        The piece of `values` that belongs to each parameter, empty for most: what the optimizer
        updates.
    """

    def __init__(
        self, parameters: list[nn.Parameter], names: dict[nn.Parameter, str], comm: Communicator
    ) -> None:
        self.parameters, self.comm = parameters, comm
        self.gradient: Tensor | None = None  # reduced, of this rank's elements
        self.placements: dict[nn.Parameter, Placement] = {}
        # which of this rank's elements belong to a parameter
        self.held: dict[nn.Parameter, slice] = {}
        self.counts = cut(sum(parameter.numel() for parameter in parameters), comm.size)
        self.start = sum(self.counts[: comm.rank])
        self.stop = self.start + self.counts[comm.rank]
        offset = 0  # of the parameter among all elements
        for parameter in parameters:
            first, last = (
                min(max(end - offset, 0), parameter.numel()) for end in (self.start, self.stop)
            )
            begin = max(offset - self.start, 0)
            self.held[parameter] = slice(begin, begin + last - first)
            self.placements[parameter] = Placement(
                names[parameter], parameter.shape, first, last, comm
            )
            offset += parameter.numel()

    def make_slices(self, values: Tensor) -> None:
        """Make slices of `values`, this rank's elements, for the optimizer to update."""
        self.values = values
        self.slices = {
            p: make_slice(values[self.held[p]], self.placements[p], p) for p in self.parameters
        }

    def check_place(self) -> None:
        """Raise RuntimeError if new values would not reach parameters, which lie elsewhere by
        now.
        """

    def add_gradient(self, shard: Tensor) -> None:
        """Add this rank's elements of a reduced gradient to the gradient, where it is still
        wanted.
        """
        shard = shard.to(self.values)
        # What was forgotten, by parameter or by slice, is known by the slice alone.
        if self.gradient is not None:
            for parameter, piece in self.slices.items():
                if piece._grad is None:
                    self.gradient[self.held[parameter]].zero_()
        self.gradient = shard if self.gradient is None else self.gradient.add_(shard)

    def give_gradient(self, without: set[nn.Parameter]) -> None:
        """Give each slice its piece of the gradient, or None if its parameter is among those
        `without` one.
        """
        for parameter, piece in self.slices.items():
            used = self.gradient is not None and parameter not in without
            gradient = self.gradient[self.held[parameter]] if used else None  # type: ignore[index]
            piece.grad = gradient

    def forget_gradients(self, parameters: Set[nn.Parameter]) -> None:
        """Forget the gradients of these parameters, as far as they are in this shard."""
        for parameter, piece in self.slices.items():
            if parameter in parameters:
                piece.grad = None  # `add_gradient` then begins anew


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor lies, and as what: two with the same place are one piece of memory."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.device


def moved(name: str, view: Tensor, parameter: Tensor) -> str:
    """Return what to say of a parameter that is no longer the `view` which its strategy fills."""
    was, now = (f"{tensor.dtype} on {tensor.device}" for tensor in (view, parameter))
    how = "lies in other memory" if was == now else f"was converted from {was} to {now}"
    return (
        f"{name} {how} since it was shared out, so new values would not reach it: call .to(), "
        ".half(), ... on the model before that, and let only one strategy or ShardedOptimizer "
        "share out the same parameters"
    )


class ShardedParameter(nn.Parameter):
    """A parameter whose `grad` is the gradient of this rank's slice: what is clipped, scaled and
    logged.

    The parameter's own gradient, which autograd writes, is in `_grad`. It is here while it waits to
    be reduced. Copies, in memory or in a file, are parameters as they were before.
    """

    strategy: weakref.ref[Sharded]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's slice, flat, or None."""
        strategy = self.strategy()
        return self._grad if strategy is None else strategy.gradient_of(self)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        """Forget the gradient. Raises ValueError for another one: nobody would reduce it, or step
        by it.
        """
        strategy = self.strategy()
        if strategy is None:
            self._grad = gradient
        elif gradient is None:
            strategy.forget_gradients({self})
        elif gradient is not self.grad:  # `p.grad += x` sets what it has changed in place
            kind = type(strategy).__name__
            raise ValueError(
                f"the gradient of this parameter is that of a slice of {kind}, so another tensor "
                "in its place would change nothing: change it in place (parameter.grad.mul_(2), "
                ".copy_(...)), or set it to None"
            )

    @grad.deleter
    def grad(self) -> None:
        """Forget the gradient, as `del` does with torch's parameters."""
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that no strategy has sharded."""
        copied = deepcopy(self.unlinked(), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a parameter that no strategy has sharded."""
        return self.unlinked().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def unlinked(self) -> nn.Parameter:
        """Return a parameter of the kind that this one was, on the same memory."""
        kind = type(self).__bases__[-1]
        twin: nn.Parameter = Tensor._make_subclass(kind, self.data, self.requires_grad)
        twin.__dict__.update(
            {name: value for name, value in vars(self).items() if name != "strategy"}
        )
        return twin


class Links:
    """Makes each parameter a `ShardedParameter`, until `remove`. Keeps neither parameters nor
    strategy alive.
    """

    def __init__(self, strategy: Sharded, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [(weakref.ref(parameter), type(parameter)) for parameter in parameters]
        for parameter in parameters:
            parameter.__class__ = with_gradient_of(ShardedParameter, type(parameter))
            parameter.strategy = weakref.ref(strategy)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Let the parameters be what they were; those that are freed say so for ever."""
        for reference, kind in self.parameters:
            parameter = reference()
            if parameter is not None:
                parameter.__class__ = freed(kind) if isinstance(parameter, FreedParameter) else kind
                del parameter.strategy  # type: ignore[attr-defined]


class Sharded(DataParallel):
    """What ZeRO 1, 2 and 3 share: an optimizer over slices of parameters is built, adopted and
    checked.
    """

    shard_of: Mapping[nn.Parameter, Shard]
    hooks: list[Any]

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""
        return self.shard_of[parameter].slices[parameter]

    @property
    def slices(self) -> list[nn.Parameter]:
        """What this rank's optimizer updates: one slice for each trained parameter, in the model's
        order.
        """
        return self.trained

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, and of their slices."""
        super().forget_gradients(parameters, set_to_none)
        for shard in {self.shard_of[parameter] for parameter in parameters}:
            shard.forget_gradients(parameters)

    @abstractmethod
    def waiting_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter that has come, and is still to be reduced."""

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what `parameter.grad` shows: this rank's slice of the reduced gradient, from when
        there is one.
        """
        own = self.waiting_gradient(parameter)
        return self.slice_of(parameter).grad if own is None else own

    @abstractmethod
    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice lacks."""

    def guard(self, parameters: Collection[nn.Parameter]) -> None:
        """Refuse optimizers that the method `optimizer` has not built, as long as the hooks are
        there.
        """
        self.posted = Guard(type(self).__name__, parameters, map(self.slice_of, parameters))
        self.hooks.append(self.posted)

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """Return an optimizer of this `kind` that holds state for this rank's slices only.

        Parameters
        ----------
        kind
            An optimizer that treats each element separately, such as torch's AdamW; or torch's
            Muon, see `SlicedMuon`.
        groups : optional
            The first argument of torch's optimizers, over the model's own parameters: parameters,
            pairs of name and parameter, or groups of them. Frozen parameters are left out. By
            default all trained parameters.
        elementwise : bool
            Say that a `kind` treats each element separately, if it is not one of torch's or of this
            package.
        options
            Arguments of `kind`.

        After its `step` all ranks have the new parameters. Its `zero_grad` forgets the gradients of
        its own parameters, so several optimizers can share a model. Its `state_dict()`, which is
        collective, returns the state of an unsharded optimizer, and `load_state_dict` takes such a
        state, whatever number of ranks has saved it.

        Raises
        ------
        ValueError
            If something in `groups` is no parameter of the model, or if `kind` is not known to work
            on slices; and in its `step`, if a parameter has a gradient that was not reduced.
        """
        trained, sliced = self._groups(
            [{"params": self.parameters_to_reduce}] if groups is None else groups
        )
        optimizer: Optimizer = build_over_slices(kind, sliced, elementwise, options)
        self._attach(optimizer, trained)
        return optimizer

    def adopt(self, optimizer: torch.optim.Optimizer, elementwise: bool = False) -> None:
        """Change an optimizer over the model's parameters, in place, so that it updates this rank's
        slices.

        The options of its groups stay, so a scheduler of the learning rate that holds it goes on.
        Its state must be equal on all ranks, and each rank keeps its part. From then on it behaves
        as one that `optimizer` has built.

        Raises
        ------
        ValueError
            As `optimizer` does; then nothing has changed.
        """
        check_elementwise(optimizer, elementwise)
        trained, sliced = self._groups(optimizer.param_groups)
        optimizer.param_groups[:] = trained
        saved = optimizer.state_dict()
        optimizer.param_groups[:] = sliced
        optimizer.state.clear()
        share_out(optimizer)
        optimizer.load_state_dict(saved)
        self._attach(optimizer, trained)

    def _groups(self, groups: ParamsT) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return groups over parameters of the model, without the frozen ones, and the same groups
        over slices.
        """
        known = known_groups(groups, self.names, f"the model in {type(self).__name__}")
        slices = {parameter: self.slice_of(parameter) for parameter in self.parameters_to_reduce}
        return [chosen(group, {p: p for p in slices}) for group in known], [
            chosen(group, slices) for group in known
        ]

    def _attach(self, optimizer: torch.optim.Optimizer, trained: list[dict[str, Any]]) -> None:
        """Hook an optimizer over slices of the `trained` parameters, so that its steps are checked
        and heard.
        """
        mine = {parameter for group in trained for parameter in group["params"]}
        optimizer.register_step_pre_hook(lambda *_: self._check_step(mine))
        optimizer.register_step_post_hook(lambda *_: self.stepped(mine))
        optimizer.zero_grad = partial(self.forget_gradients, mine)  # type: ignore[method-assign]  # the model's are meant
        self.posted.built.add(optimizer)

    def _check_step(self, parameters: Collection[nn.Parameter]) -> None:
        """Raise if a step would ignore a gradient (ValueError), or miss parameters
        (RuntimeError).
        """
        for shard in dict.fromkeys(self.shard_of.values()):  # in one order: all ranks say the same
            shard.check_place()
        for parameter in parameters:
            if self.passed_over(parameter):
                raise ValueError(
                    f"{self.names[parameter]} has a gradient that nobody has reduced: let the "
                    "last backward() run outside of no_sync(), and clip or set the gradients of "
                    "model.slices, not of parameters"
                )
