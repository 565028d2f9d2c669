"""Optimizers over slices of a model's parameters: built, adopted, and checked at each step.

model.optimizer(AdamW, ...)     groups over parameters ─▶ the same groups over this rank's slices
optimizer.step()                check ─▶ update slices ─▶ the strategy hears of it, and publishes
"""

import weakref
from collections.abc import Callable, Collection, Set
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.memory.hooks import Hook
from minidist.full.optimizer.elementwise import build_over_slices, check_elementwise
from minidist.full.optimizer.groups import chosen, known_groups
from minidist.full.optimizer.guard import Guard
from minidist.full.optimizer.state import share_out
from minidist.full.replica import Optimizer


class Owner(Protocol):
    """The strategy whose slices are updated, and whose parameters show the slices' gradients."""

    names: dict[nn.Parameter, str]
    parameters_to_reduce: list[nn.Parameter]

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's slice of a parameter."""

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what `parameter.grad` shows: this rank's slice of the reduced gradient, from when
        there is one.
        """

    def check_places(self) -> None:
        """Raise RuntimeError if new values would not reach parameters, which lie elsewhere by
        now.
        """

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter has a gradient that its slice lacks."""

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Let parameters follow their slices, which a step has updated."""

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, and of their slices, or make them zeros."""


class SliceOptimizers:
    """The optimizers over the slices of one model.

    Parameters
    ----------
    owner : Owner
        The strategy that has sharded the model. It keeps this alive, and not the other way round.
    sharded : Collection[nn.Parameter]
        The parameters of which it has slices. Until `guard.remove()`, other optimizers over these,
        or over their slices, are refused.
    """

    def __init__(self, owner: Owner, sharded: Collection[nn.Parameter]) -> None:
        self.owner, self.strategy = weakref.ref(owner), type(owner).__name__
        self.names, self.trained = owner.names, owner.parameters_to_reduce
        self.slices = {parameter: owner.slice_of(parameter) for parameter in self.trained}
        self.sharded = frozenset(map(id, sharded))
        self.parts = frozenset(id(owner.slice_of(parameter)) for parameter in sharded)
        self.built: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.guard = Guard(Hook(self._check_optimizer))

    def build(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT | None,
        elementwise: bool,
        options: dict[str, Any],
    ) -> Optimizer:
        """Return an optimizer of this `kind` that holds state for this rank's slices only.

        Parameters
        ----------
        kind
            An optimizer that treats each element separately, such as torch's AdamW, or puts slices
            together, which its attribute `elementwise` says.
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
        its own parameters, so several optimizers can share a model, and its `add_param_group` takes
        parameters of the model. Its `state_dict()`, which is
        collective, returns the state of an unsharded optimizer, and `load_state_dict` takes such a
        state, whatever number of ranks has saved it.

        Raises
        ------
        ValueError
            If something in `groups` is no parameter of the model, or if `kind` is not known to work
            on slices; and in its `step`, if a parameter has a gradient that was not reduced.
        """
        trained, sliced = self._groups([{"params": self.trained}] if groups is None else groups)
        optimizer: Optimizer = build_over_slices(kind, sliced, elementwise, options)
        self._attach(optimizer, trained)
        return optimizer

    def adopt(self, optimizer: torch.optim.Optimizer, elementwise: bool = False) -> None:
        """Change an optimizer over the model's parameters, in place, so that it updates this rank's
        slices.

        The options of its groups stay, so a scheduler of the learning rate that holds it goes on.
        Its state must be equal on all ranks, and each rank keeps its part. From then on it behaves
        as one that `build` has built.

        Raises
        ------
        ValueError
            As `build` does; then nothing has changed.
        """
        check_elementwise(optimizer, elementwise)
        trained, sliced = self._groups(optimizer.param_groups)
        # Now its state is read as that of whole parameters, and then loaded as that of slices.
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
        known = known_groups(groups, self.names, f"the model in {self.strategy}")
        whole = {parameter: parameter for parameter in self.slices}
        trained = [chosen(group, whole) for group in known]
        return trained, [chosen(group, self.slices) for group in known]

    def _attach(self, optimizer: torch.optim.Optimizer, trained: list[dict[str, Any]]) -> None:
        """Hook an optimizer over slices of the `trained` parameters, so that its steps are checked
        and heard.
        """
        owner = self.owner()
        assert owner is not None, "it builds and adopts"
        mine = {parameter for group in trained for parameter in group["params"]}
        # An optimizer that had its own bound method would keep itself alive.
        add, known = type(optimizer).add_param_group, weakref.ref(optimizer)

        def add_slices(param_group: dict[str, Any]) -> None:
            """Add a group over the model's parameters, as a group over their slices."""
            (whole,), (sliced,) = self._groups([param_group])
            optimizer = known()
            assert optimizer is not None, "it is asked"
            add(optimizer, sliced)
            mine.update(whole["params"])

        optimizer.register_step_pre_hook(lambda *_: self._check_step(owner, mine))
        optimizer.register_step_post_hook(lambda *_: owner.stepped(mine))
        # both mean the model's parameters
        optimizer.zero_grad = partial(owner.forget_gradients, mine)  # type: ignore[method-assign]
        optimizer.add_param_group = add_slices  # type: ignore[method-assign]
        self.built.add(optimizer)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, updated: Set[int]) -> None:
        """Raise ValueError if an optimizer that `build` has not built is about to step over the
        model.
        """
        if not self.sharded.isdisjoint(updated):
            fault = f"parameters that {self.strategy} shards, and would update them in vain"
        elif not self.parts.isdisjoint(updated) and optimizer not in self.built:
            fault = f"slices of {self.strategy} by hand, which would not hear of its steps"
        else:
            return
        inner = type(vars(optimizer).get("local", optimizer)).__name__  # Of a sharded one.
        raise ValueError(
            f"this {type(optimizer).__name__} was built over {fault}: wrap it, then use "
            f"model.optimizer({inner}, ...)"
        )

    def _check_step(self, owner: Owner, parameters: Collection[nn.Parameter]) -> None:
        """Raise if a step would ignore a gradient (ValueError), or miss parameters
        (RuntimeError).
        """
        owner.check_places()
        for parameter in parameters:
            if owner.passed_over(parameter):
                raise ValueError(
                    f"{self.names[parameter]} has a gradient that nobody has reduced, so this step "
                    "would ignore it: let the last backward() run outside of no_sync(), and clip "
                    "or set the gradients of model.slices, not of parameters"
                )
