"""What a rank holds of a parameter: one record, which clipping, checkpoints and optimizers read.

    whole       weight [4, 6]
    block       [4, 3]          what tensor parallelism leaves: columns 0 to 2
    slice       [5]             what ZeRO leaves of the block, flattened: elements 0 to 4
    copies      several ranks may hold the same elements; only one of them counts them (`counts`)
    experts     a block of a stack, with fewer copies than all else
    tie         stages of a pipeline may share a parameter: each has a copy

Each strategy adds what it did (`record`). What none has said of a parameter stays None.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, all_reduce
from minidist.full.comm import Communicator
from minidist.full.gradients.gradient import Spread, become_part
from minidist.full.memory.hooks import check_unwrapped

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First channel of each rank, and the one after its last."""


@dataclass(frozen=True)
class Block:
    """Which block of a whole parameter this rank holds.

    Attributes
    ----------
    name, shape
        Name and shape of the whole parameter.
    dim : int or None
        The dim along which it is cut; None if every rank holds it whole.
    bounds : Bounds
        Where each rank's block begins and ends along `dim`.
    copies : int
        How many neighbouring ranks hold the same block: 1 if no two do, the number of ranks if all
        hold the whole.
    comm : Communicator
        The ranks of the tensor axis.
    """

    name: str
    shape: torch.Size
    dim: int | None
    bounds: Bounds
    copies: int
    comm: Communicator

    @property
    def first(self) -> bool:
        """Whether this rank is the first of those that hold the same block."""
        return self.comm.rank % self.copies == 0

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's block of the whole parameter, a view."""
        if self.dim is None:
            return whole
        start, stop = self.bounds[self.comm.rank]
        return whole.narrow(self.dim, start, stop - start)

    def full(self, piece: Tensor) -> Tensor:
        """Return the whole parameter; each rank brings its block as `piece`.

        Collective: one all-gather.
        """
        if self.dim is None:
            return piece.detach()
        # of ranks that hold the same block, only the first brings it
        counts = [
            stop - start if rank % self.copies == 0 else 0
            for rank, (start, stop) in enumerate(self.bounds)
        ]
        block = piece.detach().as_subclass(Tensor)
        brought = block.narrow(self.dim, 0, counts[self.comm.rank]).contiguous()
        return all_gather(brought, self.comm, counts=counts, dim=self.dim)


@dataclass(frozen=True)
class Slice:
    """Which elements of a parameter, flattened, this rank holds.

    Attributes
    ----------
    name, shape
        Of the parameter; where tensor parallelism has cut it, of the block.
    start, stop : int
        The first of this rank's elements, and the one after the last; equal if it has none.
    comm : Communicator
        The ranks that hold the parameter together.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    comm: Communicator

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's elements of the whole parameter, flat: a view if it is contiguous."""
        return whole.as_subclass(Tensor).flatten()[self.start : self.stop]


@dataclass(frozen=True)
class ExpertGroups:
    """Experts that ranks have shared out: ranks along `others` hold other experts, ranks along
    `copies` the same ones.
    """

    others: Communicator
    copies: Communicator


@dataclass(frozen=True)
class Tie:
    """A parameter called `name` that several stages share: each rank of `comm` has a copy."""

    name: str
    comm: Communicator


@dataclass(frozen=True)
class Placement:
    """The record of a parameter, or of a slice of one.

    Attributes
    ----------
    block : Block or None
        What tensor parallelism, or sharing experts out, has left.
    slice : Slice or None
        What ZeRO has left of that.
    sliced : nn.Parameter or None
        The parameter of the model that a slice is cut from.
    experts : ExpertGroups or None
        Among which ranks experts are shared out; None for all else.
    stages : Communicator or None
        The pipeline whose other ranks hold other parameters.
    tie : Tie or None
        The stages that have this parameter, too.
    """

    block: Block | None = None
    slice: Slice | None = None
    sliced: nn.Parameter | None = None
    experts: ExpertGroups | None = None
    stages: Communicator | None = None
    tie: Tie | None = None

    @cached_property
    def axes(self) -> tuple[Communicator, ...]:
        """The ranks that share the parameter, as parts or copies, axis by axis."""
        comms = [part.comm for part in (self.slice, self.block) if part is not None]
        return tuple(comm for comm in comms if comm.size > 1)

    @property
    def counts(self) -> bool:
        """Whether this rank's copy enters norms and checkpoints: the first of those along the
        tensor and pipeline axes.
        """
        first_block = self.block is None or self.block.first
        return first_block and (self.tie is None or self.tie.comm.rank == 0)

    @property
    def alike(self) -> tuple[int, bool, str]:
        """The same for parameters of which the same ranks have copies: copies along the tensor axis
        (0: no block), whether experts are shared out, and what is tied.
        """
        copies = self.block.copies if self.block else 0
        return copies, self.experts is not None, self.tie.name if self.tie else ""

    @cached_property
    def spread(self) -> Spread | None:
        """Among which ranks gradients are spread; None if this rank has all of them."""
        axes, block, counted = self.axes, self.block, True
        if block is not None and block.copies == block.comm.size:
            # each rank of the tensor axis has all of it
            axes = tuple(comm for comm in axes if comm is not block.comm)
        elif block is not None:
            counted = block.first
        staged = self.stages is not None
        return Spread(axes, counted, staged) if axes or staged else None


WHOLE = Placement()


def placement_of(parameter: Tensor) -> Placement:
    """Return the record of a parameter or a slice; an empty one if no strategy has changed it."""
    return getattr(parameter, "placement", WHOLE)


def record(parameter: Tensor, **news: Any) -> None:
    """Add to a parameter's record, a `Placement`: `record(parameter, tie=Tie(...))`.

    Its gradients then know that they are parts, if it is spread over ranks.
    """
    parameter.placement = replace(placement_of(parameter), **news)  # type: ignore[attr-defined]
    if parameter.placement.spread is not None and not isinstance(parameter, SpreadParameter):  # type: ignore[attr-defined]
        assert isinstance(parameter, nn.Parameter)
        parameter.__class__ = mixed(SpreadParameter, type(parameter))


def shard(parameter: Tensor, block: Block) -> None:
    """Replace a parameter, in place, by this rank's block of it, and free the rest.

    A tied parameter stays tied, and is cut only once.

    Raises
    ------
    ValueError
        If the parameter was cut in another way before.
    """
    before = placement_of(parameter).block
    if before is None:
        piece = block.take(parameter.data)
        if block.dim is not None:
            piece = piece.clone(memory_format=torch.contiguous_format)
        parameter.data = piece
        parameter.grad = None
        record(parameter, block=block)
        return
    alike = (before.dim, before.bounds) == (block.dim, block.bounds)
    if not alike or block.comm is not before.comm:
        fault = (
            f"{block.name} is {before.name}, which has been cut otherwise (along dim {before.dim})"
        )
        raise ValueError(
            f"{fault}: give modules that share it styles that cut it alike, and split a model "
            "only once"
        )


def make_slice(values: Tensor, piece: Slice, parameter: nn.Parameter) -> nn.Parameter:
    """Return a slice of a parameter, for an optimizer to update: these flat `values`, with their
    record.
    """
    made = nn.Parameter(values, parameter.requires_grad)
    made.__class__ = SliceParameter
    made.placement = placement_of(parameter)  # type: ignore[attr-defined]
    record(made, slice=piece, sliced=parameter)
    return made


def sum_tied(parameter: nn.Parameter) -> None:
    """Sum the gradients of the copies of a parameter, or of a slice of it: one all-reduce.

    Collective.
    """
    tie = placement_of(parameter).tie
    assert tie is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    all_reduce(parameter.grad, tie.comm)


def ties_alike(tied: Iterable[nn.Parameter]) -> bool:
    """Tell whether the stages that share these parameters have copies of the same bits. Collective
    among them.
    """
    alike = True
    for parameter in tied:
        tie = placement_of(parameter).tie
        assert tie is not None
        bits = parameter.detach().cpu().contiguous().view(torch.uint8)
        digests = tie.comm.all_gather_object(hashlib.sha256(bits.numpy().tobytes()).hexdigest())
        alike = alike and len(set(digests)) == 1
    return alike


def copies_of(parameter: Tensor, data: Communicator) -> Communicator:
    """Return the ranks that hold the same as this one of a parameter: of experts their copies, else
    the data axis.
    """
    experts = placement_of(parameter).experts
    return experts.copies if experts else data


def by_copies(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Deal parameters out to lists, each of those of which the same ranks have copies.

    What is rounded together depends on all of it. So ranks along the tensor axis send the same of
    what they have copies of only if it travels apart from what they do not.
    """
    alike: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault(placement_of(parameter).alike, []).append(parameter)
    return list(alike.values())


def any_experts(parameters: Iterable[Tensor]) -> bool:
    """Tell whether some of these parameters are experts that ranks have shared out."""
    return any(placement_of(parameter).experts for parameter in parameters)


def check_serial(model: nn.Module, step: str) -> None:
    """Raise ValueError if a strategy was applied to a model before a `step` that has to come
    first.
    """
    check_unwrapped(model, step)
    for name, parameter in model.named_parameters():
        if placement_of(parameter) is not WHOLE:
            raise ValueError(
                f"{name} has been cut or recorded by an earlier call, and {step} begins with "
                f"whole parameters: call {step} once, and before parallelize_tensor"
            )


class SpreadParameter(nn.Parameter):
    """A parameter, or a slice of one, that is spread over ranks: each gradient it shows knows that
    it is a part.

    It does not matter who has put the gradient there, and when: autograd, a strategy, or a line of
    the user's. The record is read when the gradient is asked for.
    """

    @property
    def grad(self) -> Tensor | None:
        """The gradient of what this rank has, or None."""
        gradient: Tensor | None = self._grad
        spread = placement_of(self).spread if type(gradient) is Tensor else None
        return gradient if gradient is None or spread is None else become_part(gradient, spread)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        """Put another gradient in its place."""
        self._grad = gradient

    @grad.deleter
    def grad(self) -> None:
        """Forget the gradient, as `del` does with torch's parameters."""
        self._grad = None


class SliceParameter(SpreadParameter):
    """A slice, whose memory is what ranks publish: it stays where it is, and torch counts all
    changes of it.
    """

    @property
    def data(self) -> Tensor:
        """The values, without gradient; torch's own `data` would hide that they are changed."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        """Refuse: nobody would publish other memory."""
        piece = placement_of(self).slice
        assert piece is not None, "`make_slice` has recorded it"
        raise ValueError(
            f"data = would give this slice of {piece.name} memory that nobody publishes: write "
            "slice.data.copy_(values), and keep slice.data.clone()"
        )


@cache
def mixed(first: type[nn.Parameter], kind: type[nn.Parameter]) -> Any:
    """Return the class of parameters of this `kind` that behave as the class `first` says."""
    if kind is nn.Parameter:
        return first
    return type(f"{first.__name__}{kind.__name__}", (first, kind), {})
