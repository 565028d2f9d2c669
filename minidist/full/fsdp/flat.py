"""Flats: parameters laid end to end in one tensor, of which each rank keeps a shard.

    parameters       embedding │ norm │ query ......│ key │ value
    on three ranks   ─ shard 0 ──────│── shard 1 ──────│─ shard 2 ─
    unsharded        ───────────────────────────────────────────────   while they are used

A `Shard` is a rank's part: neighbouring elements, of one parameter or more. A `Flat` *has* a shard,
and a tensor of all elements that has memory only between `gather` and `release`; and it has a
`Transport`, which says how its elements are gathered and its gradients reduced.
"""

from collections.abc import Callable, Iterable, Set
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, all_reduce, reduce_scatter
from minidist.full.collectives.fast import cut
from minidist.full.comm import Communicator
from minidist.full.ddp.flatten import take_gradients, views_into
from minidist.full.fsdp.access.freed import hide, reveal
from minidist.full.fsdp.policy import MixedPrecision
from minidist.full.placement import Slice, make_slice

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


class Shard:
    """This rank's part of `parameters`.

    Attributes
    ----------
    counts : list[int]
        The elements of each rank's part.
    start, stop : int
        This rank's.
    pieces : dict[nn.Parameter, slice]
        Which of this rank's elements belong to each parameter: none for most.
    values : Tensor
        This rank's elements, for the optimizer to update.
    slices : dict[nn.Parameter, nn.Parameter]
        The piece of `values` that belongs to each parameter: what the optimizer updates.
    gradient : Tensor or None
        The reduced gradient of this rank's elements.
    published : int
        torch's count of changes of `values` when the parameters followed them last.
    """

    values: Tensor
    published = 0

    def __init__(
        self, parameters: list[nn.Parameter], names: dict[nn.Parameter, str], comm: Communicator
    ) -> None:
        self.parameters, self.comm = parameters, comm
        self.gradient: Tensor | None = None
        self.placements: dict[nn.Parameter, Slice] = {}
        self.pieces: dict[nn.Parameter, slice] = {}
        self.counts = cut(sum(parameter.numel() for parameter in parameters), comm.size)
        self.start = sum(self.counts[: comm.rank])
        self.stop = self.start + self.counts[comm.rank]
        offset = 0  # of the parameter among all elements
        for parameter in parameters:
            size, name = parameter.numel(), names[parameter]
            first = min(max(self.start - offset, 0), size)
            last = min(max(self.stop - offset, 0), size)
            begin = max(offset - self.start, 0)
            self.pieces[parameter] = slice(begin, begin + last - first)
            self.placements[parameter] = Slice(name, parameter.shape, first, last, comm)
            offset += size

    def make_slices(self, values: Tensor) -> None:
        """Make slices of `values`, this rank's elements, for the optimizer to update."""
        self.values = values
        self.slices = {
            parameter: make_slice(values[piece], self.placements[parameter], parameter)
            for parameter, piece in self.pieces.items()
        }

    @property
    def newer(self) -> bool:
        """Whether slices were changed since the parameters followed them."""
        return self.values._version != self.published

    def add_gradient(self, shard: Tensor) -> None:
        """Add this rank's elements of a reduced gradient to the gradient, where it is still
        wanted.
        """
        shard = shard.to(self.values)
        # What was forgotten, by parameter or by slice, is known by the slice alone.
        if self.gradient is not None:
            for parameter, piece in self.slices.items():
                if piece._grad is None:
                    self.gradient[self.pieces[parameter]].zero_()
            self.gradient += shard
        else:
            self.gradient = shard

    def give_gradient(self, without: set[nn.Parameter]) -> None:
        """Give each slice its piece of the gradient, or None if its parameter is among those
        `without` one.
        """
        for parameter, piece in self.slices.items():
            piece.grad = None
            if self.gradient is not None and parameter not in without:
                piece.grad = self.gradient[self.pieces[parameter]]

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool) -> None:
        """Forget the gradients of these parameters, as far as they are in this shard, or make them
        zeros.
        """
        for parameter, piece in self.slices.items():
            if parameter not in parameters:
                continue
            if set_to_none:
                piece.grad = None  # `add_gradient` then begins anew
            elif piece._grad is not None:
                piece._grad.zero_()


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor lies, and as what: two with the same place are one piece of memory."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.device


def moved(name: str, view: Tensor, parameter: Tensor) -> str:
    """Return what to say of a parameter that is no longer the `view` which its strategy fills."""
    was = f"{view.dtype} on {view.device}"
    now = f"{parameter.dtype} on {parameter.device}"
    how = "lies in other memory" if was == now else f"was converted from {was} to {now}"
    return (
        f"{name} {how} since it was shared out, so new values would not reach it: call .to(), "
        ".half(), ... on the model before that, and let only one strategy or sharded optimizer "
        "share out the same parameters"
    )


class Transport(Protocol):
    """How a flat travels. It runs on the stream."""

    def gather(self, flat: "Flat", unsharded: Tensor) -> None:
        """Fill `unsharded` with all ranks' elements of a flat."""

    def reduce(self, gradient: Tensor, flat: "Flat", op: str) -> Tensor:
        """Return this rank's elements of the sum, or mean, of all ranks' whole gradients."""


class Direct:
    """One all-gather, one reduce-scatter, both on `link`; then an all-reduce `across` groups that
    have the same shards, if there are any.
    """

    def __init__(self, link: Communicator, across: Communicator | None = None) -> None:
        self.link, self.across = link, across

    def gather(self, flat: "Flat", unsharded: Tensor) -> None:
        """Fill `unsharded` with all ranks' elements of a flat: one all-gather."""
        all_gather(flat.mine_for(unsharded), self.link, unsharded, counts=flat.shard.counts)

    def reduce(self, gradient: Tensor, flat: "Flat", op: str) -> Tensor:
        """Return this rank's elements of the sum, or mean, of all ranks' whole gradients."""
        if not flat.replicated and self.link.size > 1:
            gradient = reduce_scatter(gradient, self.link, op)
        else:  # in place: of one rank nothing is copied
            all_reduce(gradient, self.link, op)
        if self.across is not None:
            all_reduce(gradient, self.across, op)
        return gradient


class Flat:
    """Parameters of one dtype, all trained or all frozen, laid end to end in one tensor that exists
    while it is used.

    Parameters
    ----------
    parameters, names
        What it is of.
    comm : Communicator
        The ranks that have a shard each.
    transport : Transport
        How the elements are gathered from them, and the gradients reduced.
    replicated : bool
        Every rank has all elements all the time: `comm` is this rank alone, and nothing is gathered
        or freed.

    Attributes
    ----------
    shard : Shard
        This rank's elements in the model's dtype; in registered memory if there is any.
    mine : Tensor
        The tensor that is all-gathered: usually the shard's values. If they are offloaded or
        replicated, and `unsharded` has another dtype, a copy in that dtype.
    unsharded : Tensor
        All elements. Its storage has no bytes between uses.
    second : Tensor or None
        What the transport has kept of the last gathering, until there are new values.
    accumulated : Tensor or None
        This rank's own gradients of all elements, from when the first is collected until they are
        taken to be reduced.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        comm: Communicator,
        transport: Transport,
        precision: MixedPrecision,
        allocate: Allocate | None = None,
        replicated: bool = False,
    ) -> None:
        like = parameters[0]
        self.parameters, self.transport, self.replicated = parameters, transport, replicated
        self.device, self.trained = like.device, like.requires_grad
        self.reduction = precision.reduction
        dtype = like.dtype
        if precision.parameters is not None and like.is_floating_point():
            dtype = precision.parameters
        self.second: Tensor | None = None
        self.accumulated: Tensor | None = None
        self.accumulated_of: dict[nn.Parameter, Tensor] = {}  # views into it

        # This rank's shard: memory, then the parameters' values, then the slices of it.
        self.shard = shard = Shard(parameters, names, comm)
        allocate = allocate or self._allocate
        own = shard.stop - shard.start
        self.mine = values = allocate(shard.counts[0], like.dtype)[:own]
        if dtype != like.dtype and (replicated or values.device != self.device):
            self.mine = allocate(shard.counts[0], dtype)[:own]
        shard.make_slices(values)
        for parameter in parameters:
            self.write(parameter, parameter.detach())
        self.publish()

        # All ranks' elements: from now on the parameters are views into them, or freed.
        self.unsharded = self.mine
        if not replicated:
            self.unsharded = torch.empty(sum(shard.counts), dtype=dtype, device=self.device)
        self.views = views_into(self.unsharded, parameters)
        # what parameters show between uses
        fill = torch.nan if dtype.is_floating_point else 0
        self.nothing = torch.full((), fill, dtype=dtype, device=self.device)
        if replicated:
            self.show()
        else:
            self.release()

    def _allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return zeros. Registered memory needs the same `count` on every rank."""
        if self.device.type == "cpu" and not self.replicated:
            return self.shard.comm.allocate(count, dtype)  # type: ignore[return-value]
        return torch.zeros(count, dtype=dtype, device=self.device)

    # ---------------------------------------------------------------- values

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set this rank's elements of a parameter to those of the whole `value`.

        Call `publish` after the last.
        """
        if value.device.type != "meta":
            piece = self.shard.values[self.shard.pieces[parameter]]
            piece.copy_(self.shard.placements[parameter].take(value))

    def publish(self) -> None:
        """Let the next gathering bring the shard's new values."""
        if self.mine is not self.shard.values:
            self.mine.copy_(self.shard.values)
        self.second = None
        self.shard.published = self.shard.values._version

    def stored(self) -> list[Tensor]:
        """Return what this rank has of the parameters between uses."""
        return [self.mine] if self.second is None else [self.mine, self.second]

    def mine_for(self, unsharded: Tensor) -> Tensor:
        """Return this rank's elements as they are to be gathered into `unsharded`."""
        mine = self.mine.to(self.device, non_blocking=True)
        if mine.dtype == unsharded.dtype:
            return mine
        # cast to where it belongs: gathering then moves nothing of this rank's
        return unsharded[self.shard.start : self.shard.stop].copy_(mine)

    def show(self) -> None:
        """Let the parameters be views into what was gathered."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            reveal(parameter)
            parameter.data = view

    def check_place(self) -> None:
        """Raise RuntimeError if parameters were moved or converted: gathering would undo it."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            kind = parameter.dtype, parameter.device
            elsewhere = kind != (view.dtype, view.device)
            if elsewhere or (self.replicated and place_of(parameter) != place_of(view)):
                raise RuntimeError(moved(self.shard.placements[parameter].name, view, parameter))

    def release(self) -> None:
        """Free `unsharded`.

        What autograd has saved of it is valid again once it is gathered again.
        """
        for parameter in self.parameters:
            reveal(parameter)  # it may be freed already
            parameter.data = self.nothing.expand(parameter.shape)
            hide(parameter, self.shard.placements[parameter].name)
        storage = self.unsharded.untyped_storage()
        if not storage.resizable():
            # Memory that numpy has seen cannot be freed: it is the array's now.
            self.unsharded = torch.empty_like(self.unsharded)
            self.views = views_into(self.unsharded, self.parameters)
            storage = self.unsharded.untyped_storage()
        storage.resize_(0)

    # ---------------------------------------------------------------- gradients

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients to `accumulated`, and free each of them. A missing one counts as zero."""
        if self.accumulated is None:
            self.accumulated = torch.zeros_like(self.unsharded, dtype=self.reduction)
            views = views_into(self.accumulated, self.parameters)
            self.accumulated_of = dict(zip(self.parameters, views, strict=True))
        for parameter in parameters:
            if parameter._grad is not None:
                self.accumulated_of[parameter].add_(parameter._grad)
                parameter._grad = None

    def take_gradients(self) -> Tensor:
        """Return this rank's own gradients of all elements, and forget them."""
        if self.accumulated is None:  # one pass lays all there is end to end
            return take_gradients(self.parameters, self.reduction)
        self.collect(self.parameters)
        taken, self.accumulated, self.accumulated_of = self.accumulated, None, {}
        return taken

    def reduce(self, gradient: Tensor, op: str) -> None:
        """Add this rank's elements of the sum, or mean, of all ranks' gradients to those of its
        shard. Runs on the stream.
        """
        self.shard.add_gradient(self.transport.reduce(gradient, self, op))

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter has a gradient that its slice lacks."""
        collected = self.accumulated_of.get(parameter)  # since a backward in no_sync
        gradients = (collected, parameter._grad)
        return any(each is not None and bool(each.any()) for each in gradients)

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool) -> None:
        """Forget the gradients of these parameters, or make them zeros; if they are all of this
        tensor's, free the memory that is no longer needed.
        """
        if self.shard.slices.keys() <= parameters:
            self.accumulated, self.accumulated_of = None, {}
            if set_to_none:
                self.shard.gradient = None
        self.shard.forget_gradients(parameters, set_to_none)
        for parameter in self.accumulated_of.keys() & parameters:
            self.accumulated_of[parameter].zero_()
