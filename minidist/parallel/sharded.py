"""A model whose parameters are spread over ranks: its units, when these have memory, and its state as a whole.

`FSDP` decides when a unit is gathered; here is how.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather
from minidist.comm import Communicator
from minidist.memory.precision import check_dtype
from minidist.parallel.backward import Hook, remove_all
from minidist.parallel.buckets import views_into
from minidist.parallel.data import DataParallel
from minidist.parallel.meta import on_device
from minidist.parallel.same_steps import SameSteps
from minidist.parallel.shard import Sharded
from minidist.parallel.units import Flat, MixedPrecision, Policy, Unit, of_one_kind, split

MOST = 2  # units that are whole at a time, the root aside


class ShardedModel(Sharded, DataParallel):
    """What strategies share that keep a part of the parameters only. Arguments are those of `FSDP`."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str,
        unused: bool,
        policy: Policy | None,
        precision: MixedPrecision | None,
        shard_ranks: int | None,
        device: torch.device | str | None,
        allocate: Callable[[int, torch.dtype], Tensor] | None,
    ) -> None:
        split(model, policy)  # complains before anything is sent
        if comm.size % (shard_ranks or 1):
            raise ValueError(f"shard_ranks={shard_ranks} must divide the {comm.size} ranks into groups of one size")
        self.precision = precision or MixedPrecision()
        for dtype in (self.precision.parameters, self.precision.reduction, self.precision.output):
            if dtype is not None:
                check_dtype(dtype, torch.device(device or next(model.parameters()).device))
        super().__init__(model, comm, op, unused)
        if device is not None:
            on_device(model, torch.device(device))
            self._find_parameters()
        self.shard_comm, self.across = comm, None
        if shard_ranks is not None:
            self.shard_comm = comm.split(comm.rank // shard_ranks)
            self.across = comm.split(comm.rank % shard_ranks).fork()
        self.stream = self.shard_comm.stream()
        self.units = [
            Unit(name, module, [self._flat(kind, allocate) for kind in of_one_kind(parameters)])
            for name, module, parameters in split(model, policy)
        ]
        self.root = self.units[-1]
        at_once = all(flat.device.type != "cuda" for unit in self.units for flat in unit.flats)
        groups = [self.stream.comm] if self.across is None else [self.stream.comm, self.across]
        self.same, *self.same_across = [SameSteps(group, at_once) for group in groups]
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.flat_of = {parameter: flat for flat in self.flats for parameter in flat.parameters}
        self.used: set[nn.Parameter] = set()  # since the gradients were zeroed
        self.called: dict[Unit, None] = {}  # in order, by any forward of this step
        self.hooks: list[Any] = [
            model.register_state_dict_pre_hook(Hook(self._refuse_reading)),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(Hook(self._refuse_writing)),  # type: ignore[no-untyped-call]
        ]
        self.guard(self.names)
        weakref.finalize(self, _leave, self.hooks, model).atexit = False
        self.readable = False
        self.most_whole = MOST
        self.whole: list[Unit] = []  # and those that are being gathered; the root aside

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""
        return self.flat_of[parameter].slices[parameter]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.used.clear()
        for unit in self.units:
            unit.drop_gradients()
        for flat in self.flats:
            flat.forget_gradient()

    def forget_gradients(self, parameters: Collection[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters."""
        if len(parameters) == len(self.parameters_to_reduce):
            self.zero_grad(set_to_none)
            return
        self.used.difference_update(parameters)
        for unit in self.units:
            unit.forget_gradients(parameters)
        for flat in self.flats:
            flat.forget_gradients(parameters)

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Have the next gathering bring the new values: what ends an optimizer's step."""
        self.called.clear()
        for flat in self.flats:
            flat.publish()
        self._release_all()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all parameters whole in this context, to look at; changes are lost. Collective."""
        limit, self.most_whole = self.most_whole, len(self.units)
        self._gather_all()
        self.readable = True
        try:
            yield
        finally:
            self.readable = False
            self._release_all()
            self.most_whole = limit

    def unwrap(self) -> nn.Module:
        """Return the model, whole on every rank and without hooks, to be used alone. Collective."""
        if self.hooks:  # else that was done before, and the parameters may have changed since
            self.unguard()
            remove_all(self.hooks)
            self.most_whole = len(self.units)
            self._gather_all()
        return self.module

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole of each parameter, in the optimizer's dtype, gathering a unit at a time. Collective."""
        for flat in self.flats:
            whole = torch.empty(sum(flat.counts), dtype=flat.values.dtype, device=flat.device)
            all_gather(flat.values.to(flat.device), self.shard_comm, out=whole, counts=flat.counts)
            for parameter, value in zip(flat.parameters, views_into(whole, flat.parameters), strict=True):
                yield self.names[parameter], value

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return what the serial model's `state_dict` would be, on the CPU of every rank. Collective."""
        whole = {name: value.to("cpu", copy=True) for name, value in self.full_tensors()}
        aliases = {name: self.names.get(p) for name, p in self.module.named_parameters(remove_duplicate=False)}
        self.readable = True
        state = self.module.state_dict()  # for its names, their order, and the buffers
        self.readable = False
        return {name: whole[aliases[name]] if name in aliases else value.cpu() for name, value in state.items()}  # type: ignore[index]

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Take over whole parameters: a serial model's state, or drawn one after the other. Every rank needs them all.

        Raises
        ------
        ValueError
            If names or shapes are not this model's. A `Mapping` has changed nothing then.
        """
        names = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers())
        missing, wrong = set(self.names.values()), []
        writes: list[Callable[[], object]] = []
        for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
            target = names.get(name, buffers.get(name))
            if target is None or target.shape != value.shape:
                here = "nothing" if target is None else list(target.shape)
                wrong.append(f"{name} is {list(value.shape)} there and {here} here")
            elif name in names:
                writes.append(partial(self.flat_of[names[name]].write, names[name], value))
                missing.discard(self.names[names[name]])
            else:
                writes.append(partial(buffers[name].copy_, value))
            while writes and not isinstance(tensors, Mapping):  # what is drawn one by one must not pile up
                writes.pop()()
        wrong += [f"{name} is missing" for name in self.names.values() if name in missing]
        if wrong:
            more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"these parameters belong to another model: {'; '.join(wrong[:3])}{more}")
        for write in writes:
            write()
        self.stepped()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        """Refuse to be moved or converted."""
        raise TypeError(
            f"a model that {type(self).__name__} has sharded cannot be moved or converted: do that before, or pass "
            "precision=MixedPrecision(...)"
        )

    def _refuse_reading(self, *_: Any) -> None:
        if not self.readable:
            raise TypeError(
                f"a rank has a part of what {type(self).__name__} sharded: use its full_state_dict() instead"
            )

    def _refuse_writing(self, *_: Any) -> None:
        raise TypeError(f"a rank has a part of what {type(self).__name__} sharded: use its load(state) instead")

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """Return the tensors of this rank, by category of the account."""
        gradients = [flat.gradient for flat in self.flats if flat.gradient is not None]
        gradients += [whole for unit in self.units for whole in unit.gradients.values()]
        return {"parameters": [flat.mine for flat in self.flats], "gradients": gradients}

    # ---------------------------------------------------------------- memory of units

    def _flat(self, parameters: list[nn.Parameter], allocate: Callable[[int, torch.dtype], Tensor] | None) -> Flat:
        return Flat(parameters, self.names, self.shard_comm, self.precision, allocate)

    def _bring(self, unit: Unit, then: Unit | None, beside: Unit | None = None) -> None:
        """Have a unit whole, and the one that is needed `then` on its way."""
        self._start(unit, beside)
        if then is not None:
            self._start(then, unit)
        self._finish(unit)

    def _start(self, unit: Unit, *beside: Unit | None) -> None:
        """Begin to gather a unit, in place of one that is neither of those `beside`, if there are too many."""
        if unit.whole:
            return
        if unit is not self.root:
            if len(self.whole) == self.most_whole:
                self._release(next(other for other in self.whole if other not in beside))
            self.whole.append(unit)
        unit.whole = True
        unit.gathering = self.stream.launch(self._fetch, unit, [flat.make_room() for flat in unit.flats])

    def _fetch(self, unit: Unit, wholes: list[Tensor]) -> None:
        """Gather a unit. Runs on the stream."""
        self.same.step(f"gather {unit.name or 'the root unit'}")
        for flat, whole in zip(unit.flats, wholes, strict=True):
            flat.fetch(whole, self.stream.comm)

    def _finish(self, unit: Unit) -> None:
        """Wait until a unit is there."""
        if unit.gathering is not None:
            unit.gathering.wait()
            unit.gathering = None
            for flat in unit.flats:
                flat.show()

    def _release(self, unit: Unit) -> None:
        """Free a unit's whole parameters."""
        if not unit.whole:
            return
        if unit.gathering is not None:
            unit.gathering.wait()
            unit.gathering = None
        for flat in unit.flats:
            flat.release()
        unit.whole = False
        if unit is not self.root:
            self.whole.remove(unit)

    def _gather_all(self) -> None:
        """Gather every unit anew."""
        self._release_all()
        for unit in self.units:
            self._start(unit)
            self._finish(unit)

    def _release_all(self) -> None:
        for unit in self.units:
            self._release(unit)


def _leave(hooks: list[Any], model: nn.Module) -> None:
    """Take the hooks off a model whose strategy is gone, and with it what the other ranks hold of the parameters."""
    if hooks:
        remove_all(hooks)
        model.register_forward_pre_hook(_refuse, prepend=True)
        model.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(model: nn.Module, *_: object) -> NoReturn:
    raise RuntimeError(
        f"the parameters of this {type(model).__name__} were shared out by a strategy that is gone: keep what wraps a "
        "model as long as the model is used, or call its unwrap() first"
    )
