"""ZeRO 3, or fully sharded data parallelism: `plain.py`'s stage 3 for any model, by hooks, and with
overlap: the next unit is gathered while one is in use, and gradients are reduced beside backward.

    forward    gather 1 │ use 1, gather 2 │ use 2, gather 3 │ use 3
                                free 1 ─┘         free 2 ─┘
    backward            use 3, gather 2 │ use 2, gather 1 │ use 1        gather: all-gather from every rank's shard
                                 free 3 ┘, reduce-scatter its gradients

    plain.py                         here
    unshard before a forward         `_pre_forward`, which calls `_unshard`; that gathers the next unit as well
    reshard after it                 `_post_forward`
    unshard before a backward        `_pre_backward`
    reshard after it                 `_post_backward`
    reduce_scatter                   `_gradient_arrived` and `_reduce_line`, which call `_reduce` on the stream

The model is cut into *units*, such as its blocks. Parameters in none of them belong to the root
unit, which is whole from the start of forward to the end of backward. At most two others are whole
at a time: the one in use, and the next.

With n bytes of parameters on P ranks, each rank sends (P - 1)/P of 3 n bytes: parameters are
gathered twice, gradients reduce-scattered once. For the root it is 2 n, and for all units without
`reshard_after_forward`. Each rank holds n/P of parameters, of gradients and of each moment, and the
units that are whole. (Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, PyTorch FSDP.)

Hybrid sharding cuts parameters inside groups of ranks, such as a node, and keeps copies in the
other groups: gathers stay inside a group, and 1/`shard_ranks` of the gradients is all-reduced
across. (Zhao et al. 2023, section 3.2.2.)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from minidist.collectives import all_reduce
from minidist.parallel.data.backward import BackwardEnd, Hook
from minidist.parallel.sharded.sharded_model import ShardedModel
from minidist.parallel.sharded.units import Flat, Unit


class FSDP(ShardedModel):
    """Sharded parameters, gradients and optimizer state.

    Build the optimizer with `optimizer`; clip its gradients with `clip_by_global_norm(model.slices,
    ...)`, or with torch's `clip_grad_norm_(model.parameters(), ...)`: `parameter.grad` is the
    gradient of this rank's slice. Outside of their units parameters are freed: read them in
    `gathered`, or from `full_state_dict`. Whoever reads them elsewhere, or writes into them, gets a
    RuntimeError; for methods that are not `forward` there is `register_fsdp_forward_method`. All
    ranks must call the same units in the same order; if they do not, a `MismatchError` says where
    they differ.

    Parameters
    ----------
    model, comm, op, unused
        As for `DataParallel`. A model on the device `meta` costs no memory.
    policy : optional
        `policy(module)` tells whether a module is a unit. By default the elements of `ModuleList`s
        are units, or else the model's children.
    reshard_after_forward : bool
        Free each unit after its forward, and gather it again in backward. Without it, units stay
        whole in between.
    precision : MixedPrecision or callable
        That of all units, or `precision(module)` that returns a unit's.
    shard_ranks : int, optional
        For hybrid sharding: how many neighbouring ranks form a group that cuts the parameters.
    device : optional
        Where the shards of a model on `meta` are to be; they are zeros until `load` fills them.
    allocate : optional
        `allocate(count, dtype)` returns the memory of a shard. It may be on the CPU, or a file
        (`offload.mapped`).
    replicated : collection of nn.Parameter
        Every rank holds these whole all the time, and all-reduces their gradients. For small ones,
        such as norms.
    ignored : collection of nn.Parameter
        These stay as they are, even if they differ between ranks; their gradients are the caller's
        business.

    Slices have no names of their own: `slice_of(parameter)` is the slice of a parameter, `slices`
    has all in the order of the trained `named_parameters()`, and `slice.placement` says which
    elements of which parameter a slice holds.

    Raises
    ------
    ValueError
        If the policy chooses nothing or a parameter twice, or if `shard_ranks` does not divide the
        number of ranks; and in the step of an optimizer over the parameters themselves.
    """

    def _register_hooks(self) -> None:
        self.order: list[Unit] = []  # in which the last forward called them
        self.next: dict[Unit, Unit] = {}  # what to gather next in forward
        self.previous: dict[Unit, Unit] = {}  # and in backward
        self.in_forward: Unit | None = None
        self.root_runs = False  # the model's forward, or another method of it
        self.within: set[Unit] = set()  # units of which a registered method runs
        self.in_backward: Unit | None = None
        # whose gradients are still to be reduced, in the order in which all ranks do it
        self.line: list[Unit] = []
        self.reducing: Any = None
        # A GPU is still to compute the gradients that have "arrived" here: to gather then would be
        # to wait for them.
        self.ahead_of_time = any(flat.device.type == "cuda" for flat in self.flats)
        self.end = BackwardEnd(self._backward_ended, self.comm)
        for unit in self.units:
            before, after = UnitHook(self._pre_forward, unit), Hook(self._post_forward, unit)
            # Before all other hooks: some, such as those of weight_norm, use the parameters.
            self.hooks.append(
                unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            )
            self.hooks.append(unit.module.register_forward_hook(after))
        for parameter in self.parameters_to_reduce:
            self.hooks.append(
                parameter.register_post_accumulate_grad_hook(Hook(self._gradient_arrived))  # type: ignore[no-untyped-call]
            )

    def synchronize(self) -> None:
        """Do nothing: when `backward()` returns, all gradients are reduced."""

    # ---------------------------------------------------------------- forward

    def as_forward(self, unit: Unit, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call another method of a unit as if it were its forward; see
        `register_fsdp_forward_method`.
        """
        if unit in self.within or unit is self.in_forward or (unit is self.root and self.root_runs):
            return method(*args, **kwargs)  # called from within the unit: its parameters are whole
        args, kwargs = self._pre_forward(unit, unit.module, args, kwargs)
        self.within.add(unit)
        try:
            output = method(*args, **kwargs)
        finally:
            self.within.discard(unit)
        return self._post_forward(unit, unit.module, args, output)

    def _pre_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit in self.within:
            return args, kwargs
        if unit.precision.parameters is not None:
            args, kwargs = cast((args, kwargs), unit.precision.parameters)
        if recomputing():  # a part of forward again, in backward
            self._unshard(unit, None, self.in_backward)
        else:
            self._enter(unit)
        if unit is self.root or not torch.is_grad_enabled():
            return args, kwargs
        return followed((args, kwargs), Hook(self._post_backward, unit))

    def _enter(self, unit: Unit) -> None:
        if unit is self.root:
            self.order, self.in_backward, self.root_runs = [], None, True
        elif self.in_forward is not None:
            raise RuntimeError(
                f"{self.in_forward.name} calls {unit.name}: let a policy choose only one of them"
            )
        self.in_forward = unit if unit is not self.root else None
        self.order.append(unit)
        self.entered[unit] = None
        self._unshard(unit, self.next.get(unit))

    def _post_forward(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> Any:
        if unit in self.within:
            return output
        self.in_forward = None
        output = unit.apart(output)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors and torch.is_grad_enabled():
            fault = (
                f"{unit.name or 'the model'} returns a {type(output).__name__} in which no "
                "tensors can be seen"
            )
            raise TypeError(f"{fault}: return tensors, or tuples, lists or dictionaries of them")
        if unit is self.root:
            self.root_runs = False
            self._pass_ended("forward")
            self.next = dict(pairwise(self.order))
            self.previous = {after: before for before, after in pairwise([*self.order, self.root])}
        if unit.precision.output is not None:
            output = cast(output, unit.precision.output)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in differentiable:
            tensor.register_hook(Hook(self._pre_backward, unit))  # type: ignore[no-untyped-call]
        if not differentiable or (
            self.reshard_after_forward and unit not in (self.root, self.in_backward)
        ):
            self._reshard(unit)
        return output

    # ---------------------------------------------------------------- backward

    def _pre_backward(self, unit: Unit, _: Tensor) -> None:
        """The gradient of a unit's output has come: its parameters are needed now."""
        self._backward_runs()
        if unit not in (self.root, self.in_backward):
            self.in_backward = unit
            self._unshard(
                unit, self.previous.get(unit) if self.ahead_of_time or not unit.parameters else None
            )

    def _post_backward(self, unit: Unit) -> None:
        """The gradients of a unit's inputs have come: its parameters are no longer needed."""
        self._reshard(unit)
        if self.in_backward is unit:
            self.in_backward = None

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has added to `parameter.grad`."""
        self._backward_runs()
        unit = self.unit_of[parameter]
        if unit not in (self.root, self.in_backward):
            raise RuntimeError(
                f"{self.names[parameter]} was used outside the forward of its unit {unit.name}, "
                "or for what that does not return: return all that the loss needs, or pass a "
                "policy that does not choose this unit"
            )
        self._check_arrival(parameter, unit.arrived)
        flat = self.shard_of[parameter]
        if not self.synchronising or flat.own is not None:
            flat.collect([parameter])
        unit.arrived.add(parameter)
        self.used.add(parameter)
        if (
            unit in self.previous
            and unit is self.in_backward
            and 2 * len(unit.arrived) >= len(unit.parameters)
        ):
            # not before about half its activations are free
            self._prefetch(self.previous[unit], unit)
        if self.synchronising:
            self._reduce_line()

    def _backward_runs(self) -> None:
        self._refuse_graphs()
        if not self.end.expect():
            return
        self._unshard(self.root, self.previous.get(self.root))
        called = [
            unit
            for unit in dict.fromkeys([*reversed(self.order), *self.entered])
            if unit is not self.root
        ]
        self.line = [unit for unit in [*called, self.root] if unit.parameters]
        for unit in self.units:
            unit.arrived.clear()

    def _reduce_line(self, all_of_them: bool = False) -> None:
        """Reduce the complete units at the head of the line; at most two units' gradients wait for
        it at a time.
        """
        while self.line and (
            all_of_them or len(self.line[0].arrived) == len(self.line[0].parameters)
        ):
            unit = self.line.pop(0)
            if self.reducing is not None:
                self.reducing.wait()
            gradients = [(flat, flat.take_gradients()) for flat in unit.trained]
            self.reducing = self.stream.launch(self._reduce, unit.name, gradients)

    def _reduce(self, name: str, gradients: list[tuple[Flat, Tensor]]) -> None:
        """Add this rank's shard of all ranks' gradients to what it has. Runs on the stream."""
        for same in (self.same, *self.same_across):
            same.step(f"reduce the gradients of {name or 'the root unit'}")
        for flat, gradient in gradients:
            shard = flat.reduce(gradient, self.op)
            if self.across is not None:
                all_reduce(shard, self.across, self.op)
            flat.add_gradient(shard)

    def _backward_ended(self) -> None:
        self.in_backward = None
        if self.synchronising and any(unit.arrived for unit in self.units):
            self._reduce_line(all_of_them=True)
            self._pass_ended("backward")
            self.reducing.wait()
            self.reducing = None
            self._drop_unused(self.used)
            for flat in self.flats:
                flat.give_gradient(self.nowhere_used)
        else:
            self._pass_ended("backward")
        self._reshard_all()

    def _pass_ended(self, which: str) -> None:
        """Let the ranks compare their steps. On a GPU this waits for the other hosts, but for no
        GPU.
        """
        for same in (self.same, *(self.same_across if which == "backward" else ())):
            self.stream.launch(same.step, f"the end of {which}", True)


class UnitHook(Hook):
    """The hook before a unit's forward, by which the unit's module is known as such."""

    def asked(self) -> tuple[FSDP | None, Unit | None]:
        """Return the model and the unit whose hook this is, if they still exist."""
        method: Any = self.method()
        return (None if method is None else method.__self__), self.first[0]()


def followed(inputs: Any, work: Callable[[], None]) -> Any:
    """Return the nested `inputs`, so hooked that backward calls `work` once it has all their
    gradients.
    """
    tensors = [
        leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not tensors:
        return inputs
    passed = iter(Begin.apply(work, *tensors))  # type: ignore[no-untyped-call]
    return tree_map_only(
        Tensor, lambda tensor: next(passed) if tensor.requires_grad else tensor, inputs
    )


class Begin(torch.autograd.Function):
    """The identity of a unit's inputs, whose backward runs, and calls `work`, when all their
    gradients have come.
    """

    @staticmethod
    def forward(ctx: Any, work: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return `inputs`."""
        ctx.work = work
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return `gradients`."""
        ctx.work()
        return None, *gradients


def recomputing() -> bool:
    """Tell whether a backward has called this forward, to recompute activations."""
    return torch._C._current_graph_task_id() != -1


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return nested `values` with all floating-point tensors in `dtype`."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )
