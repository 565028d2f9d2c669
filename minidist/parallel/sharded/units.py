"""Units of ZeRO-3: parameters that are gathered together.

between uses    shard 0 │ shard 1 │ shard 2        each rank its own; the parameters are NaN, and cost nothing
in use          ─────────── whole ───────────      on every rank; the parameters are views into it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from minidist.collectives import all_gather, all_reduce, reduce_scatter
from minidist.comm import Communicator
from minidist.comm.stream import Handle, Stream
from minidist.parallel.data.buckets import kind_of, views_into
from minidist.parallel.sharded.same_steps import SameSteps
from minidist.parallel.sharded.shard import Shard
from minidist.parallel.sharded.storage import make_room

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtype is used where; None: that of the model. Shards and the optimizer's state keep the model's.

    Attributes
    ----------
    parameters
        Of gathered parameters, so of computing, of the inputs' floats and of activations.
    reduction
        Of gradients while they are summed over ranks; by default that of `parameters`.
    output
        Of what the model returns.
    """

    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    output: torch.dtype | None = None


class Flat(Shard):
    """Parameters of one dtype, all trained or all frozen, end to end in one tensor that exists while it is needed.

    Attributes
    ----------
    mine : Tensor
        This rank's elements as they are gathered, in registered memory where there is such.
    values : Tensor
        The same as the optimizer updates them: `mine` itself, or in the dtype of the model if the precision differs.
    whole : Tensor
        All elements. Its storage has no bytes between uses.
    replicated : bool
        Every rank has all elements all the time: `comm` is this rank alone, and nothing is gathered or freed.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        comm: Communicator,
        precision: MixedPrecision,
        allocate: Allocate | None = None,
        replicated: bool = False,
    ) -> None:
        super().__init__(parameters, names, comm)
        like, self.replicated = parameters[0], replicated
        dtype = precision.parameters if precision.parameters and like.is_floating_point() else like.dtype
        self.device, self.trained = like.device, like.requires_grad
        allocate = allocate or self._allocate
        self.mine = allocate(self.counts[0], dtype)[: self.stop - self.start]
        self.values = self.mine
        if dtype != like.dtype:
            self.values = allocate(self.counts[0], like.dtype)[: self.stop - self.start]
        for parameter in parameters:
            self.write(parameter, parameter.detach())
        self.publish()
        self.whole = self.mine if replicated else torch.empty(sum(self.counts), dtype=dtype, device=self.device)
        self.views = views_into(self.whole, parameters)
        nothing = torch.nan if dtype.is_floating_point else 0
        self.nothing = torch.full((), nothing, dtype=dtype, device=self.device)  # seen by who looks at the wrong time
        if replicated:
            self.show()
        else:
            self.release()
        self.make_slices(self.values)

    def _allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return zeros; as many on every rank, as registered memory has to be."""
        if self.device.type == "cpu" and not self.replicated:
            return self.comm.allocate(count, dtype)  # type: ignore[return-value]
        return torch.zeros(count, dtype=dtype, device=self.device)

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set this rank's elements of a parameter to those of the whole `value`; `publish` comes after the last."""
        if value.device.type != "meta":
            self.values[self.held[parameter]].copy_(self.placements[parameter].take(value))

    def publish(self) -> None:
        """Take over new values into what is gathered."""
        if self.values is not self.mine:
            self.mine.copy_(self.values)

    def fetch(self, whole: Tensor, comm: Communicator) -> None:
        """Gather all elements from all ranks. Runs on the stream."""
        all_gather(self.mine.to(self.device, non_blocking=True), comm, out=whole, counts=self.counts)

    def reduce(self, gradient: Tensor, comm: Communicator, op: str) -> Tensor:
        """Return this rank's elements of what becomes of all ranks' whole gradients. Runs on the stream."""
        if not self.replicated:
            return reduce_scatter(gradient, comm, op)
        all_reduce(gradient, comm, op)
        return gradient

    def stored(self) -> list[Tensor]:
        """Return what this rank has of the parameters between uses."""
        return [self.mine]

    def show(self) -> None:
        """Let the parameters be what was gathered."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def release(self) -> None:
        """Free the whole. What autograd has saved of it is valid again when it is gathered again."""
        for parameter in self.parameters:
            parameter.data = self.nothing.expand(parameter.shape)
        self.whole.untyped_storage().resize_(0)

    def forget_gradients(self, parameters: Set[nn.Parameter]) -> None:
        """Have no gradients of these parameters; let go of the memory of all, as it is, if these are all."""
        if self.slices.keys() <= parameters:
            self.gradient = None
        super().forget_gradients(parameters)


class UnitState(Enum):
    """Where the parameters of a unit are."""

    SHARDED = auto()
    UNSHARDING = auto()  # they are being gathered, and nobody has waited for them yet
    UNSHARDED = auto()


class Unit:
    """`PlainUnit` for a unit of any parameters, gathered beside computing: begin to `unshard`, wait, use, `reshard`.

    Its gradients lie in a flat tensor of their own until they are reduced.
    """

    def __init__(self, name: str, module: nn.Module, flats: list[Flat], precision: MixedPrecision) -> None:
        self.name, self.module, self.flats, self.precision = name, module, flats, precision
        self.trained = [flat for flat in flats if flat.trained]
        self.cut = [flat for flat in flats if not flat.replicated]
        self.parameters = {parameter for flat in self.trained for parameter in flat.parameters}
        self.state = UnitState.SHARDED
        self.gathering: Handle | None = None
        self.arrived: set[nn.Parameter] = set()  # gradients that came in this backward
        self.gradients: dict[Flat, Tensor] = {}  # whole, but this rank's own, until they are reduced
        self.places: dict[nn.Parameter, Tensor] = {}  # views into these

    def unshard(self, stream: Stream[Communicator], same: SameSteps) -> None:
        """Begin to gather the parameters."""
        assert self.state is UnitState.SHARDED, "a unit is gathered once"
        self.gathering = stream.launch(self._fetch, stream.comm, same, [make_room(flat.whole) for flat in self.cut])
        self.state = UnitState.UNSHARDING

    def _fetch(self, comm: Communicator, same: SameSteps, wholes: list[Tensor]) -> None:
        """Gather them. Runs on the stream."""
        same.step(f"gather {self.name or 'the root unit'}")
        for flat, whole in zip(self.cut, wholes, strict=True):
            flat.fetch(whole, comm)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.state, self.gathering = UnitState.UNSHARDED, None
            for flat in self.cut:
                flat.show()

    def reshard(self) -> None:
        """Free all parameters but the shards."""
        self.wait_for_unshard()
        if self.state is UnitState.UNSHARDED:
            for flat in self.cut:
                flat.release()
            self.state = UnitState.SHARDED

    def apart(self, output: Any) -> Any:
        """Return nested `output` with copies of what lies in the memory of parameters, which is about to be freed."""
        ours = [flat.whole.data_ptr() for flat in self.flats if flat.whole.data_ptr()]
        return tree_map_only(Tensor, lambda t: t.clone() if t.untyped_storage().data_ptr() in ours else t, output)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move gradients from where autograd put them to those of their unit; no gradient counts as zero."""
        if not self.gradients:
            dtype = self.precision.reduction
            self.gradients = {flat: torch.zeros_like(flat.whole, dtype=dtype) for flat in self.trained}
            for flat, whole in self.gradients.items():
                self.places |= zip(flat.parameters, views_into(whole, flat.parameters), strict=True)
        for parameter in parameters:
            if parameter.grad is not None:
                self.places[parameter].add_(parameter.grad)
                parameter.grad = None

    def take_gradients(self) -> dict[Flat, Tensor]:
        """Return all gradients, and forget them."""
        self.collect(self.parameters)
        taken = self.gradients
        self.gradients, self.places = {}, {}
        return taken

    def forget_gradients(self, parameters: Set[nn.Parameter]) -> None:
        """Drop what has not been reduced of these parameters."""
        if self.parameters <= parameters:
            self.gradients, self.places = {}, {}
        for parameter in self.parameters & parameters:
            parameter.grad = None
            if parameter in self.places:
                self.places[parameter].zero_()


def of_one_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Deal parameters into lists of one kind each."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(kind_of(parameter), []).append(parameter)
    return list(kinds.values())
