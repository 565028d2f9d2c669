"""A model whose parameters are spread over ranks: its units, and when they have memory.

`FSDP` decides which unit is needed, and which one is next (`FSDP.next`, `FSDP.previous`). This file
gathers the first (`_unshard`), begins to gather the next (`_prefetch`), and frees another one if
more than `MOST` would be whole.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.comm.stream import Stream
from minidist.parallel.data.backward import Hook, remove_all
from minidist.parallel.meta import on_device
from minidist.parallel.placement import copies_of
from minidist.parallel.sharded.policy import Policy, Precision, precision_of, split
from minidist.parallel.sharded.same_steps import SameSteps
from minidist.parallel.sharded.shard import Links
from minidist.parallel.sharded.units import (
    Allocate,
    Flat,
    MixedPrecision,
    Unit,
    UnitState,
    of_one_kind,
)
from minidist.parallel.sharded.whole import Whole

MOST = 2  # units that may be whole at a time, besides the root


class ShardedModel(Whole):
    """A model of which each rank keeps a part of the parameters. Arguments are those of `FSDP`."""

    whole_parameters = whole_gradients = False
    stream: Stream[Communicator]

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
    ) -> None:
        chosen = split(model, policy)  # complains before anything is sent
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
        precisions = [
            precision_of(module, precision, not name, where) for name, module, _ in chosen
        ]
        super().__init__(model, comm, op, unused)
        if device is not None:
            on_device(model, where)
        self._divide(shard_ranks)
        self.allocate = allocate
        self.hooks: list[Any] = [Links(self, self.names)]
        self.units: list[Unit] = []
        for (name, module, parameters), each in zip(chosen, precisions, strict=True):
            self.units.append(Unit(name, module, self._flats(parameters, each), each))
        self.root = self.units[-1]
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.unit_of = {parameter: unit for unit in self.units for parameter in unit.parameters}
        self.shard_of = {parameter: flat for flat in self.flats for parameter in flat.parameters}
        self.used: set[nn.Parameter] = set()  # since the gradients were zeroed
        self.entered: dict[Unit, None] = {}  # in order, by any forward of this step
        for module in model.modules():  # a part's own state lacks values, as the whole one does
            self.hooks.append(module.register_state_dict_pre_hook(Hook(self._refuse_reading)))  # type: ignore[no-untyped-call]
            self.hooks.append(module.register_load_state_dict_pre_hook(Hook(self._refuse_writing)))  # type: ignore[no-untyped-call]
        self.guard(self.names)
        weakref.finalize(self, _leave, self.hooks, model).atexit = False
        self.readable = False
        self.reshard_after_forward = reshard_after_forward
        self.most_whole = MOST if reshard_after_forward else len(self.units)
        self.whole: list[Unit] = []  # or being gathered; without the root
        self._register_hooks()

    @abstractmethod
    def _register_hooks(self) -> None:
        """Hook modules and parameters, to hear when a unit is needed, and when no longer."""

    @property
    def kept(self) -> list[nn.Parameter]:
        """What a checkpoint keeps of this rank: its slices, those of frozen parameters, too."""
        return [piece for flat in self.flats for piece in flat.slices.values()]

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, and of their slices."""
        super().forget_gradients(parameters, set_to_none)
        self.used -= parameters

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice lacks."""
        waiting = self.shard_of[parameter].places.get(parameter)  # since a backward in no_sync
        return any(each is not None and bool(each.any()) for each in (waiting, parameter._grad))

    def waiting_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter that has come, and is still to be reduced."""
        return parameter._grad

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Let the next gathering bring the new values. Each step of the optimizer ends with
        this.
        """
        self.entered.clear()
        for flat in self.flats:
            flat.publish()
        self._reshard_all()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make all parameters whole in this context, to be read; changes are lost. Collective: one
        gathering.
        """
        self._unshard_all()
        self.readable = True
        try:
            yield
        finally:
            self.readable = False
            self._reshard_all()

    def unwrap(self) -> nn.Module:
        """Return the model, whole on every rank and without hooks, to be used alone. Collective:
        one gathering.
        """
        if self.hooks:  # else it was unwrapped before, and the parameters may have changed since
            remove_all(self.hooks)
            self._unshard_all()
        return self.module

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        """Refuse to be moved or converted."""
        kind = type(self).__name__
        raise TypeError(
            f"what {kind} has sharded cannot be moved or converted: do that before, or pass "
            "precision="
        )

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be compiled as a whole."""
        raise TypeError(
            f"compile() would compile the hooks of {type(self).__name__}, too, and read "
            "parameters before they are gathered: call compile_blocks(model.layers) instead, "
            "before or after wrapping"
        )

    def _refuse_reading(self, *_: Any) -> None:
        if not self.readable:
            raise TypeError(
                f"a rank has a part of what {type(self).__name__} sharded: use its "
                "full_state_dict()"
            )

    def _refuse_writing(self, *_: Any) -> None:
        raise TypeError(
            f"a rank has a part of what {type(self).__name__} sharded: use its load(state) instead"
        )

    def volume(self, microbatches: int) -> tuple[str, float]:
        """Return what a rank sends in a step: each microbatch gathers all units twice, and the root
        once.

        Gradients of what is trained are reduced once.
        """
        ranks, group, m = self.comm.size, self.shard_comm.size, microbatches
        inside, n, trained = 0.0, 0, 0
        for flat in self.flats:
            times, size = (
                2 * m - m * (flat in self.root.flats),
                sum(parameter.nbytes for parameter in flat.parameters),
            )
            inside += (flat.link.size - 1) / flat.link.size * size * (times + flat.trained)
            n, trained = n + size, trained + size * flat.trained
        if group == ranks:
            units = f"{2 * m + 1} x bytes" if trained == n else f"{2 * m} x bytes + those trained"
            copies = ", of experts with P copies" * (len(self.links) > 1)
            return f"(P - 1)/P x ({units} - {m} x root's){copies}", inside
        return f"the formula for groups of {group}", inside + 2 * (
            1 - group / ranks
        ) * trained / group

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """Return this rank's tensors by category, for `Account`: shards, and gradients of any
        kind.
        """
        gradients = [
            each for flat in self.flats for each in (flat.gradient, flat.own) if each is not None
        ]
        return {
            "parameters": [kept for flat in self.flats for kept in flat.stored()],
            "gradients": gradients,
        }

    # ---------------------------------------------------------------- memory of units

    def _divide(self, shard_ranks: int | None) -> None:
        """Make the communicators: the ranks that cut the parameters, those with the same part, and
        this rank alone.
        """
        comm = self.comm
        self.shard_comm, self.across = comm, None
        if shard_ranks is not None:
            self.shard_comm = comm.split(comm.rank // shard_ranks)
            self.across = comm.split(comm.rank % shard_ranks).fork()
        self.stream = self.shard_comm.stream()
        experts = dict.fromkeys(
            copies for p in self.names if (copies := copies_of(p, comm)) is not comm
        )
        if experts and shard_ranks is not None:
            raise ValueError(
                f"shard_ranks={shard_ranks} knows no experts that ranks have shared out: leave it "
                "out"
            )
        self.links = {self.shard_comm: self.stream.comm} | {
            copies: copies.fork() for copies in experts
        }
        self.single = comm.split(comm.rank) if self.replicated else comm
        at_once = all(parameter.device.type != "cuda" for parameter in self.names)
        groups = [self.stream.comm] if self.across is None else [self.stream.comm, self.across]
        self.same, *self.same_across = [SameSteps(group, at_once) for group in groups]

    def _flats(self, parameters: list[nn.Parameter], precision: MixedPrecision) -> list[Flat]:
        """Return the flat tensors of a unit: first those that are cut, then those that every rank
        has whole.
        """
        mine = [parameter for parameter in parameters if parameter not in self.ignored]
        cut = of_one_kind(parameter for parameter in mine if parameter not in self.replicated)
        kept = of_one_kind(parameter for parameter in mine if parameter in self.replicated)
        flats = [self._flat(kind, precision) for kind in cut]
        return flats + [
            Flat(kind, self.names, self.single, precision, None, True, self._link(kind))
            for kind in kept
        ]

    def _group(self, parameters: list[nn.Parameter]) -> Communicator:
        """Return the ranks that cut these parameters: of experts that have fewer copies than all
        else, the copies.
        """
        copies = copies_of(parameters[0], self.comm)
        return self.shard_comm if copies is self.comm else copies

    def _link(self, parameters: list[nn.Parameter]) -> Communicator:
        return self.links[self._group(parameters)]

    def _flat(self, parameters: list[nn.Parameter], precision: MixedPrecision) -> Flat:
        comm, link = self._group(parameters), self._link(parameters)
        # experts with one copy
        alone = comm is not self.shard_comm and comm.size == 1 and self.allocate is None
        return Flat(parameters, self.names, comm, precision, self.allocate, alone, link)

    def _unshard(self, unit: Unit, then: Unit | None, beside: Unit | None = None) -> None:
        """Make a unit whole, and begin to gather the one that is needed `then`."""
        self._prefetch(unit, beside)
        if then is not None:
            self._prefetch(then, unit)
        unit.wait_for_unshard()

    def _prefetch(self, unit: Unit, *beside: Unit | None) -> None:
        """Begin to gather a unit. If too many are whole, free one first, but none of those
        `beside`.
        """
        if unit.state is not UnitState.SHARDED:
            return
        if unit is not self.root:
            if len(self.whole) == self.most_whole:
                self._reshard(next(other for other in self.whole if other not in beside))
            self.whole.append(unit)
        unit.unshard(self.stream, self.same)

    def _reshard(self, unit: Unit) -> None:
        unit.reshard()
        if unit in self.whole:
            self.whole.remove(unit)

    def _unshard_all(self) -> None:
        """Gather every unit anew, all at a time."""
        self._reshard_all()
        for unit in self.units:
            unit.unshard(self.stream, self.same)
            unit.wait_for_unshard()

    def _reshard_all(self) -> None:
        for unit in self.units:
            self._reshard(unit)


def _leave(hooks: list[Any], model: nn.Module) -> None:
    """Take the hooks off a model whose strategy is gone, and refuse its use: its parameters cannot
    be gathered.
    """
    if hooks:
        remove_all(hooks)
        model.register_forward_pre_hook(_refuse, prepend=True)
        model.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(model: nn.Module, *_: object) -> NoReturn:
    raise gone(model)


def gone(model: nn.Module | None) -> RuntimeError:
    """Return the error for the use of a model whose parameters cannot be gathered any more."""
    fault = (
        f"the parameters of this {type(model).__name__} were shared out by a strategy that is gone"
    )
    return RuntimeError(
        f"{fault}: keep what wraps a model as long as the model is used, or call its unwrap() first"
    )
