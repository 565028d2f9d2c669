"""ZeRO 3, or fully sharded data parallelism, with overlap.

The next unit is gathered while one is in use, and gradients are reduced while backward goes on.

    forward    gather 1 │ use 1, gather 2 │ use 2, gather 3 │ use 3
                                free 1 ─┘         free 2 ─┘
    backward            use 3, gather 2 │ use 2, gather 1 │ use 1        gather: all-gather from every rank's shard
                                 free 3 ┘, reduce-scatter its gradients

    FSDP has                         which has
    `units`                          `Flat`s, each with this rank's `Shard` and a `Transport`
    `window`                         the units that are unsharded now, and those that come next
    `passes`                         the hooks: what is needed, what is freed, what is reduced
    `ranks`                          the communicators: who cuts what
    `optimizers`                     the slices of its shards

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

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.comm import Communicator
from minidist.full.ddp.backward import Hook, remove_all
from minidist.full.ddp.buckets import of_one_kind
from minidist.full.ddp.strategy import DataParallel
from minidist.full.fsdp.access import state
from minidist.full.fsdp.access.closed import ClosedState, leave
from minidist.full.fsdp.access.freed import COMPILED
from minidist.full.fsdp.access.linked import LinkedGradients
from minidist.full.fsdp.flat import Allocate, Flat, Transport
from minidist.full.fsdp.passes import Passes
from minidist.full.fsdp.policy import (
    MixedPrecision,
    Policy,
    Precision,
    precision_of,
    split,
)
from minidist.full.fsdp.ranks import Ranks
from minidist.full.fsdp.unit import Unit
from minidist.full.fsdp.window import MOST, Window
from minidist.full.meta import on_device
from minidist.full.optimizer.over_slices import SliceOptimizers
from minidist.full.replica import Optimizer, Replica


class FSDP(DataParallel):
    """Sharded parameters, gradients and optimizer state. To read: `minidist.fsdp.FSDP`.

    Build the optimizer with `optimizer`; clip its gradients with `clip_by_global_norm(model.slices,
    ...)`, or with torch's `clip_grad_norm_(model.parameters(), ...)`: `parameter.grad` is the
    gradient of this rank's slice. Outside of their units parameters are freed: read them in
    `gathered`, or from `full_state_dict`. Whoever reads them elsewhere, or writes into them, gets a
    RuntimeError; for methods that are not `forward` there is `register_fsdp_forward_method`. All
    ranks must call the same units in the same order; if they do not, a `MismatchError` says where
    they differ.

    Parameters
    ----------
    model, comm, op, unused, equal
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
        Where the shards of a model on `meta` are to be; they are NaN until `load` fills them.
        Buffers that no state has, such as rotary tables, must not be on `meta`.
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
    has all in the order of the trained `named_parameters()`, and `placement_of(slice)` says which
    elements of which parameter a slice holds.

    Raises
    ------
    ValueError
        If the policy chooses nothing or a parameter twice, or if `shard_ranks` does not divide the
        number of ranks; and in the step of an optimizer over the parameters themselves.
    """

    whole_parameters = whole_gradients = False

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        policy: Policy | None = None,
        reshard_after_forward: bool = True,
        precision: Precision = None,
        shard_ranks: int | None = None,
        device: torch.device | str | None = None,
        allocate: Allocate | None = None,
        replicated: Collection[nn.Parameter] = (),
        ignored: Collection[nn.Parameter] = (),
        *,
        equal: bool = False,
    ) -> None:
        # First all complaints that need no message.
        chosen = split(model, policy)
        if comm.size % (shard_ranks or 1):
            raise ValueError(
                f"shard_ranks={shard_ranks} must divide the {comm.size} ranks into groups of one "
                "size"
            )
        self.replicated, self.ignored = frozenset(replicated), frozenset(ignored)
        if strangers := len((self.replicated | self.ignored) - set(model.parameters())):
            raise ValueError(
                f"{strangers} of the parameters in replicated= and ignored= are none of the model's"
            )
        where = torch.device(device or next(model.parameters()).device)
        state.check_buffers(model, where)
        precisions = [
            precision_of(module, precision, not name, where) for name, module, _ in chosen
        ]
        super().__init__(model, comm, op, unused, equal=equal)
        if device is not None:
            on_device(model, where)

        # Then units, whose flats take the parameters over.
        self.allocate = allocate
        self.ranks = self._make_ranks(shard_ranks)
        self.stream = self.ranks.stream
        self.hooks.append(LinkedGradients(self, self.names))
        self.units = [
            Unit(name, module, self._make_flats(parameters, each), each)
            for (name, module, parameters), each in zip(chosen, precisions, strict=True)
        ]
        self.root = self.units[-1]
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.flat_of = {parameter: flat for flat in self.flats for parameter in flat.parameters}
        most = MOST if reshard_after_forward else len(self.units)
        self.window = Window(self.units, most, self.ranks)

        # Then what the model says to others: to torch's state dicts, and to optimizers.
        self.closed = ClosedState(model, type(self).__name__)
        self.optimizers = SliceOptimizers(self, self.names)
        self.hooks += [self.closed, self.optimizers.guard]
        weakref.finalize(self, leave, self.hooks, model).atexit = False

        # Last the hooks that gather, free and reduce while the model runs.
        self.passes = Passes(self.window, self.expected, self.op, reshard_after_forward, self.hooks)
        self.hooks.append(model.register_forward_pre_hook(Hook(self.follow), prepend=True))

    def _make_ranks(self, shard_ranks: int | None) -> Ranks:
        return Ranks(self.comm, self.names, shard_ranks, bool(self.replicated))

    def _make_transport(self, parameters: list[nn.Parameter]) -> Transport:
        """Return how the flat of these parameters, which are cut, is to travel."""
        return self.ranks.direct(parameters)

    def _make_flats(self, parameters: list[nn.Parameter], precision: MixedPrecision) -> list[Flat]:
        """Return the flats of a unit: first those that are cut, then those that every rank has
        whole.
        """
        names, ranks, flats = self.names, self.ranks, []
        mine = [parameter for parameter in parameters if parameter not in self.ignored]
        for kind in of_one_kind(p for p in mine if p not in self.replicated):
            comm, transport = ranks.cutting(kind), self._make_transport(kind)
            # Experts with one copy have nobody to be cut with: they stay whole, like what is
            # replicated.
            alone = comm is not ranks.shard_comm and comm.size == 1 and self.allocate is None
            flats.append(
                Flat(kind, names, comm, transport, precision, self.allocate, replicated=alone)
            )
        for kind in of_one_kind(p for p in mine if p in self.replicated):
            flats.append(
                Flat(kind, names, ranks.single, ranks.direct(kind), precision, replicated=True)
            )
        return flats

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        self.passes.synchronize()

    # ---------------------------------------------------------------- gradients and optimizers

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""
        return self.flat_of[parameter].shard.slices[parameter]

    slices = Replica.trained
    """What this rank's optimizer updates: one slice for each trained parameter, in the model's
    order.
    """

    @property
    def kept(self) -> list[nn.Parameter]:
        """What a checkpoint keeps of this rank: its slices, those of frozen parameters, too."""
        return [piece for flat in self.flats for piece in flat.shard.slices.values()]

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what `parameter.grad` shows: this rank's slice of the reduced gradient, from when
        there is one.
        """
        own = parameter._grad
        return self.slice_of(parameter).grad if own is None else own

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, and of their slices, or make them zeros."""
        super().forget_gradients(parameters, set_to_none)
        for flat in {self.flat_of[parameter] for parameter in parameters}:
            flat.forget_gradients(parameters, set_to_none)
        if set_to_none:
            self.passes.used -= parameters

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """Return an optimizer of this `kind` that holds state for this rank's slices only.

        See `SliceOptimizers.build`.
        """
        return self.optimizers.build(kind, groups, elementwise, options)

    def adopt(self, optimizer: torch.optim.Optimizer, elementwise: bool = False) -> None:
        """Change an optimizer over the model's parameters, in place, so that it updates this rank's
        slices; see `SliceOptimizers.adopt`.
        """
        self.optimizers.adopt(optimizer, elementwise)

    def check_places(self) -> None:
        """Raise RuntimeError if parameters were moved or converted: gathering would undo it."""
        for flat in self.flats:
            flat.check_place()

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice lacks."""
        return self.flat_of[parameter].passed_over(parameter)

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Let the next gathering bring the new values.

        Each step of the optimizer ends with this. A backward through a forward from before it
        raises, as in torch.
        """
        torch.autograd.graph.increment_version(updated or self.flat_of)
        self.window.entered.clear()
        for flat in self.flats:
            flat.publish()
        self.window.reshard_all()

    def follow(self, *_: object) -> None:
        """Let the next gathering bring slices that were changed since, but by no step."""
        if any(flat.shard.newer for flat in self.flats):
            for flat in self.flats:
                flat.publish()
            self.window.reshard_all()

    # ---------------------------------------------------------------- the whole state

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole of each parameter; see `state.full_tensors`. Collective."""
        return state.full_tensors(self.flats, self.names)

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and whole gradient of each trained parameter; see `state.full_gradients`.

        Collective.
        """
        return state.full_gradients(self.flats, self.names)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` that the serial model would have, on the CPU of every rank; its
        buffers are rank 0's.

        Collective.
        """
        with self.closed.opened():
            return state.full_state_dict(self.module, self.flats, self.names, self.comm)

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Load whole parameters: a serial model's state, or pairs that are drawn one by one.

        Every rank needs them all. Raises as `state.load`.
        """
        state.load(self.module, self.flat_of, self.names, tensors)
        self.stepped()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make all parameters whole in this context, to be read; changes are lost.

        Collective: one gathering.
        """
        self._gather_all()
        try:
            with self.closed.opened():
                yield
        finally:
            self.window.reshard_all()

    def unwrap(self) -> nn.Module:
        """Return the model, whole on every rank and without hooks, to be used alone.

        Collective: one gathering.
        """
        if self.hooks:  # else it was unwrapped before, and the parameters may have changed since
            remove_all(self.hooks)
            self._gather_all()
        return self.module

    def _gather_all(self) -> None:
        self.window.unshard_all()

    # ---------------------------------------------------------------- what is asked of it

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step: each microbatch gathers all units twice, and the root
        once, and reduces the gradients of what is trained.
        """
        return self.ranks.volume(self.flats, self.root.flats, microbatches)

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """Return this rank's tensors by category, for `Account`: shards, and gradients of any
        kind.
        """
        gradients = [
            each for flat in self.flats for each in (flat.shard.gradient, flat.accumulated)
        ]
        return {
            "parameters": [kept for flat in self.flats for kept in flat.stored()],
            "gradients": [each for each in gradients if each is not None],
        }

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        """Refuse to be moved or converted."""
        raise TypeError(
            f"what {type(self).__name__} has sharded cannot be moved or converted, as its shards "
            "would stay what they are: do that before, or pass precision="
        )

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be compiled as a whole."""
        raise TypeError(COMPILED.format("compile()"))
