"""Units of ZeRO-3: parameters that are gathered together.

between uses    shard 0 │ shard 1 │ shard 2        each rank has its own; parameters are freed
in use          ─────────── whole ───────────      on every rank; the parameters are views into it
"""

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
from minidist.parallel.data.buckets import kind_of, make_room, take_gradients, views_into
from minidist.parallel.freed import hide, reveal
from minidist.parallel.sharded.same_steps import SameSteps
from minidist.parallel.sharded.shard import Shard, moved, place_of

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtype is used where; None is the model's. Shards and the optimizer's state always have
    the model's.

    Attributes
    ----------
    parameters : torch.dtype, optional
        Of gathered parameters; inputs are cast to it, so it is that of computing and of activations
        as well.
    reduction : torch.dtype, optional
        Of gradients while they are summed over ranks; by default that of `parameters`.
    output : torch.dtype, optional
        Of what the model returns.
    """

    parameters: torch.dtype | None = None
    reduction: torch.dtype | None = None
    output: torch.dtype | None = None


class Flat(Shard):
    """Parameters of one dtype, all trained or all frozen, laid end to end in one tensor that exists
    while it is used.

    Attributes
    ----------
    values : Tensor
        This rank's elements in the model's dtype, for the optimizer to update; in registered memory
        if there is any.
    mine : Tensor
        What is gathered: `values` itself, cast on its way. But of values that lie elsewhere than
        the parameters (they are offloaded), or that every rank has, a copy in the dtype of `whole`
        is kept, if that is another one.
    whole : Tensor
        All elements. Its storage has no bytes between uses.
    own : Tensor or None
        This rank's own gradients of all elements, from when the first is collected until they are
        taken to be reduced.
    replicated : bool
        Every rank has all elements all the time: `comm` is this rank alone, and nothing is gathered
        or freed.
    link : Communicator
        On which the stream gathers the elements and reduces their gradients.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        comm: Communicator,
        precision: MixedPrecision,
        allocate: Allocate | None = None,
        replicated: bool = False,
        link: Communicator | None = None,
    ) -> None:
        super().__init__(parameters, names, comm)
        like, self.replicated, self.link = parameters[0], replicated, link or comm
        dtype = (
            precision.parameters
            if precision.parameters and like.is_floating_point()
            else like.dtype
        )
        self.device, self.trained, self.reduction = (
            like.device,
            like.requires_grad,
            precision.reduction,
        )
        self.own: Tensor | None = None
        self.places: dict[nn.Parameter, Tensor] = {}  # views into `own`
        allocate = allocate or self._allocate
        self.mine = self.values = allocate(self.counts[0], like.dtype)[: self.stop - self.start]
        if dtype != like.dtype and (replicated or self.values.device != self.device):
            self.mine = allocate(self.counts[0], dtype)[: self.stop - self.start]
        for parameter in parameters:
            self.write(parameter, parameter.detach())
        self.publish()
        self.whole = (
            self.mine
            if replicated
            else torch.empty(sum(self.counts), dtype=dtype, device=self.device)
        )
        self.views = views_into(self.whole, parameters)
        # What parameters show between uses:
        self.nothing = torch.full(
            (), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.device
        )
        if replicated:
            self.show()
        else:
            self.release()
        self.make_slices(self.values)

    def _allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return zeros. Registered memory needs the same `count` on every rank."""
        if self.device.type == "cpu" and not self.replicated:
            return self.comm.allocate(count, dtype)  # type: ignore[return-value]
        return torch.zeros(count, dtype=dtype, device=self.device)

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set this rank's elements of a parameter to those of the whole `value`. Call `publish`
        after the last.
        """
        if value.device.type != "meta":
            self.values[self.held[parameter]].copy_(self.placements[parameter].take(value))

    def publish(self) -> None:
        """Copy new `values` into `mine`, if that is a copy."""
        if self.values is not self.mine:
            self.mine.copy_(self.values)

    def fetch(self, whole: Tensor) -> None:
        """Gather all elements from all ranks: one all-gather. Runs on the stream."""
        mine = self.mine.to(self.device, non_blocking=True)
        # cast to where it belongs: gathering then moves nothing of this rank's
        if mine.dtype != whole.dtype:
            mine = whole[self.start : self.stop].copy_(mine)
        all_gather(mine, self.link, out=whole, counts=self.counts)

    def reduce(self, gradient: Tensor, op: str) -> Tensor:
        """Return this rank's elements of the sum, or mean, of all ranks' whole gradients. Runs on
        the stream.
        """
        if not self.replicated and self.link.size > 1:
            return reduce_scatter(gradient, self.link, op)
        all_reduce(gradient, self.link, op)  # in place: of one rank nothing is copied
        return gradient

    def stored(self) -> list[Tensor]:
        """Return what this rank has of the parameters between uses."""
        return [self.mine]

    def show(self) -> None:
        """Let the parameters be views into what was gathered."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            reveal(parameter)
            parameter.data = view

    def check_place(self) -> None:
        """Raise RuntimeError if parameters were moved or converted: gathering would undo it."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            elsewhere = (parameter.dtype, parameter.device) != (view.dtype, view.device)
            if elsewhere or (self.replicated and place_of(parameter) != place_of(view)):
                raise RuntimeError(moved(self.placements[parameter].name, view, parameter))

    def release(self) -> None:
        """Free `whole`. What autograd has saved of it is valid again once it is gathered again."""
        for parameter in self.parameters:
            reveal(parameter)  # it may be freed already
            parameter.data = self.nothing.expand(parameter.shape)
            hide(parameter, self.placements[parameter].name)
        self.whole.untyped_storage().resize_(0)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients to `own`, and free each of them. A missing one counts as zero."""
        if self.own is None:
            self.own = torch.zeros_like(self.whole, dtype=self.reduction)
            self.places = dict(
                zip(self.parameters, views_into(self.own, self.parameters), strict=True)
            )
        for parameter in parameters:
            if parameter._grad is not None:
                self.places[parameter].add_(parameter._grad)
                parameter._grad = None

    def take_gradients(self) -> Tensor:
        """Return this rank's own gradients of all elements, and forget them."""
        if self.own is None:  # nothing was collected: one pass lays all there is end to end
            return take_gradients(self.parameters, self.reduction)
        self.collect(self.parameters)
        taken, self.own, self.places = self.own, None, {}
        return taken

    def forget_gradients(self, parameters: Set[nn.Parameter]) -> None:
        """Forget the gradients of these parameters; if they are all of this tensor's, free the
        memory, too.
        """
        if self.slices.keys() <= parameters:
            self.gradient, self.own, self.places = None, None, {}
        super().forget_gradients(parameters)
        for parameter in self.places.keys() & parameters:
            self.places[parameter].zero_()


class UnitState(Enum):
    """Whether the parameters of a unit are whole."""

    SHARDED = auto()
    UNSHARDING = auto()  # they are being gathered, and nobody has waited for it yet
    UNSHARDED = auto()


class Unit:
    """`PlainUnit` beside computing, with any parameters: `unshard` begins, then `wait_for_unshard`,
    use, `reshard`.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: list[Flat], precision: MixedPrecision
    ) -> None:
        self.name, self.module, self.flats, self.precision = name, module, flats, precision
        self.trained = [flat for flat in flats if flat.trained]
        self.cut = [flat for flat in flats if not flat.replicated]
        self.parameters = {parameter for flat in self.trained for parameter in flat.parameters}
        self.state = UnitState.SHARDED
        self.gathering: Handle | None = None
        self.arrived: set[nn.Parameter] = set()  # gradients that came in this backward

    def unshard(self, stream: Stream[Communicator], same: SameSteps) -> None:
        """Begin to gather the parameters."""
        assert self.state is UnitState.SHARDED, "a unit is gathered once"
        self.gathering = stream.launch(
            self._fetch, same, [make_room(flat.whole) for flat in self.cut]
        )
        self.state = UnitState.UNSHARDING

    def _fetch(self, same: SameSteps, wholes: list[Tensor]) -> None:
        """Gather the parameters. Runs on the stream."""
        same.step(f"gather {self.name or 'the root unit'}")
        for flat, whole in zip(self.cut, wholes, strict=True):
            flat.fetch(whole)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.state, self.gathering = UnitState.UNSHARDED, None
            for flat in self.flats:
                flat.check_place()
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
        """Return the nested `output`, with copies of tensors that lie in the unit's memory, which
        may be freed now.
        """
        ours = [flat.whole.data_ptr() for flat in self.flats if flat.whole.data_ptr()]
        return tree_map_only(
            Tensor, lambda t: t.clone() if t.untyped_storage().data_ptr() in ours else t, output
        )


def of_one_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Deal parameters out to lists of one kind each."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(kind_of(parameter), []).append(parameter)
    return list(kinds.values())
