"""What a rank holds of a parameter: records that clipping, checkpoints and optimizers read.

whole          weight [4, 6]     tensor parallelism gives a rank a block of it (`TensorPlacement`): columns 0 to 2
block          [4, 3]            ZeRO gives a rank some elements of the block, flattened (`Placement`): 0 to 5
copies         several ranks may hold the same elements; only one of them counts them (`counts`)
experts        are a block of a stack, and have fewer copies than all else (`ExpertGroups`)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather
from minidist.comm import Communicator
from minidist.parallel.gradient import Spread, become_part

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First channel of each rank, and the one after its last."""


@dataclass(frozen=True)
class TensorPlacement:
    """Which block of a parameter this rank holds.

    Attributes
    ----------
    name, shape
        Of the whole parameter.
    dim : int or None
        The dim along which it is cut; None if every rank holds it whole.
    bounds : Bounds
        Of each rank, along `dim`.
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

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's block of the whole parameter, a view."""
        if self.dim is None:
            return whole
        start, stop = self.bounds[self.comm.rank]
        return whole.narrow(self.dim, start, stop - start)

    def full(self, piece: Tensor) -> Tensor:
        """Return the whole parameter; each rank brings its block as `piece`. Collective: one
        all-gather.
        """
        if self.dim is None:
            return piece.detach()
        counts = [
            (stop - start) * (rank % self.copies == 0)
            for rank, (start, stop) in enumerate(self.bounds)
        ]
        rows = piece.detach().movedim(self.dim, 0).contiguous()[: counts[self.comm.rank]]
        return all_gather(rows, self.comm, counts=counts).movedim(0, self.dim).contiguous()


@dataclass(frozen=True)
class Placement:
    """Which elements of a parameter, flattened, this rank holds as a slice.

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
        return whole.flatten()[self.start : self.stop]


def shard(parameter: Tensor, placement: TensorPlacement) -> None:
    """Replace a parameter, in place, by this rank's slice of it, and free the rest.

    A tied parameter stays tied, and is cut only once.

    Raises
    ------
    ValueError
        If the parameter was cut in another way before.
    """
    before = tensor_placement_of(parameter)
    if before is None:
        piece = placement.take(parameter.data)
        parameter.data = (
            piece if placement.dim is None else piece.clone(memory_format=torch.contiguous_format)
        )
        parameter.grad = None
        parameter.tensor_placement = placement  # type: ignore[attr-defined]
        mark_gradients(parameter)
    elif (before.dim, before.bounds) != (
        placement.dim,
        placement.bounds,
    ) or placement.comm is not before.comm:
        fault = (
            f"{placement.name} is {before.name}, which has been cut otherwise (along dim "
            f"{before.dim})"
        )
        raise ValueError(
            f"{fault}: give modules that share it styles that cut it alike, and split a model "
            "only once"
        )


def make_slice(values: Tensor, placement: Placement, parameter: nn.Parameter) -> nn.Parameter:
    """Return a slice of a parameter, for an optimizer to update: these flat `values`, with their
    record.
    """
    piece = nn.Parameter(values, parameter.requires_grad)
    piece.placement = placement  # type: ignore[attr-defined]
    piece.block_of = parameter  # type: ignore[attr-defined]
    mark_gradients(piece)
    return piece


def placement_of(parameter: Tensor) -> Placement | None:
    """Return the record of a slice that ZeRO has made; None for a parameter that is no slice."""
    return getattr(parameter, "placement", None)


def tensor_placement_of(parameter: Tensor) -> TensorPlacement | None:
    """Return the tensor-parallel record of a parameter, or of a slice of one; None if there is
    none.
    """
    return getattr(getattr(parameter, "block_of", parameter), "tensor_placement", None)


@dataclass(frozen=True)
class ExpertGroups:
    """The record of shared-out experts: along `ep` ranks of the data axis hold others, along
    `copies` the same ones.
    """

    ep: Communicator
    copies: Communicator


def expert_groups_of(parameter: Tensor) -> ExpertGroups | None:
    """Return the record of experts, or of a slice of them, that ranks have shared out; None for all
    else.
    """
    return getattr(getattr(parameter, "block_of", parameter), "expert_groups", None)


def copies_of(parameter: Tensor, data: Communicator) -> Communicator:
    """Return the ranks that hold the same as this one of a parameter: of experts their copies, else
    the data axis.
    """
    groups = expert_groups_of(parameter)
    return groups.copies if groups else data


def record_stages(parameters: Iterable[nn.Parameter], comm: Communicator) -> None:
    """Record that these are a stage's, and that other ranks of a pipeline's `comm` hold other
    parameters.
    """
    for parameter in parameters:
        parameter.stages = comm  # type: ignore[attr-defined]
        mark_gradients(parameter)


def stages_of(parameter: Tensor) -> Communicator | None:
    """Return the ranks of the pipeline that has a parameter, or a slice of one, in one of its
    stages.
    """
    return getattr(getattr(parameter, "block_of", parameter), "stages", None)


@dataclass(frozen=True)
class Tie:
    """The record of a parameter called `name` that several stages share: each rank of `comm` has a
    copy.
    """

    name: str
    comm: Communicator


def tied_across(parameter: Tensor) -> Tie | None:
    """Return the record of a parameter, or of a slice of one, that other stages have, too; None if
    none has.
    """
    return getattr(getattr(parameter, "block_of", parameter), "tie", None)


def sharing(parameter: Tensor) -> tuple[Communicator, ...]:
    """Return the ranks that share a parameter, as parts or copies, axis by axis, by its records."""
    block, piece = tensor_placement_of(parameter), placement_of(parameter)
    return tuple(
        record.comm for record in (piece, block) if record is not None and record.comm.size > 1
    )


def spread_of(parameter: Tensor) -> Spread | None:
    """Return among which ranks a parameter is spread; None if this rank has all of it."""
    block, axes, staged = (
        tensor_placement_of(parameter),
        sharing(parameter),
        stages_of(parameter) is not None,
    )
    counted = True
    if block is not None and block.copies == block.comm.size:
        # each rank of the tensor axis has all of it
        axes = tuple(comm for comm in axes if comm is not block.comm)
    elif block is not None:
        counted = block.comm.rank % block.copies == 0
    return Spread(axes, counted, staged) if axes or staged else None


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
        spread = spread_of(self) if type(gradient) is Tensor else None
        return gradient if gradient is None or spread is None else become_part(gradient, spread)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        """Put another gradient in its place."""
        self._grad = gradient

    @grad.deleter
    def grad(self) -> None:
        """Forget the gradient, as `del` does with torch's parameters."""
        self._grad = None


def mark_gradients(parameter: Tensor) -> None:
    """Let the gradients of a parameter know that they are parts, if its records say that it is
    spread over ranks.
    """
    if spread_of(parameter) is not None and not isinstance(parameter, SpreadParameter):
        assert isinstance(parameter, nn.Parameter)
        parameter.__class__ = with_gradient_of(SpreadParameter, type(parameter))


@cache
def with_gradient_of(shows: type[nn.Parameter], kind: type[nn.Parameter]) -> Any:
    """Return the class of parameters of this `kind` whose attribute `grad` is that of the class
    `shows`.
    """
    return (
        shows
        if kind is nn.Parameter
        else type(f"{shows.__name__}{kind.__name__}", (shows, kind), {})
    )


def counts(parameter: Tensor) -> bool:
    """Whether this rank's copy enters norms and checkpoints: the first of those along the tensor
    and pipeline axes.
    """
    block, tie = tensor_placement_of(parameter), tied_across(parameter)
    return (block is None or block.comm.rank % block.copies == 0) and (
        tie is None or tie.comm.rank == 0
    )
