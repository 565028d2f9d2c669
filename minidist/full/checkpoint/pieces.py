"""Pieces of tensors: which elements of a whole one a rank holds, and how a piece is put together
from others.

weight [4, 6], its columns cut for two ranks of tensor parallelism, each block dealt out by ZeRO to
two ranks:

    block 0 1 2 │ block 3 4 5
      a a a     │   c c c         a   dim 1, columns 0 to 3, elements 0 to 7 of that block, flattened
      a a a     │   c c c         b   dim 1, columns 0 to 3, elements 7 to 12
      a b b     │   c d d         c   dim 1, columns 3 to 6, elements 0 to 7
      b b b     │   d d d         d   dim 1, columns 3 to 6, elements 7 to 12

Seen as a matrix [dims before `dim`, `dim` and the dims after it], a block is some columns of the
tensor, and a piece of a block is all but the beginning and the end of some rows of these. Where the
wanted and the stored pieces lie in one block, neighbours in one are neighbours in the other, and
exactly the wanted elements are read. Otherwise the stored pieces that may touch the wanted one are
pasted into a whole tensor, and the wanted one is cut from it.

Cost: every stored element is read at most once for each wanted piece; memory for one whole tensor
at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Reader: TypeAlias = Callable[[int, int], Tensor]
"""Returns elements `start` to `stop` of a stored piece, flat."""


@dataclass(frozen=True)
class Extent:
    """Which elements of a whole tensor: a range of those of a block, flattened.

    Attributes
    ----------
    shape : tuple[int, ...]
        Shape of the whole tensor; `()` for a single number.
    dim : int or None
        The dim that tensor parallelism cuts; None if the block is the whole tensor.
    first, last : int
        The block has the indices `first` to `last` - 1 along `dim`; both are 0 if `dim` is None.
    start, stop : int
        The elements `start` to `stop` - 1 of the block, flattened.

    Raises
    ------
    ValueError
        If there are no such elements in a tensor of that shape.
    """

    shape: tuple[int, ...]
    dim: int | None
    first: int
    last: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        # -1: there is no such dim
        size = 0 if self.dim is None else dict(enumerate(self.shape)).get(self.dim, -1)
        if not 0 <= self.first <= self.last <= size or not 0 <= self.start <= self.stop <= prod(
            self.block_shape
        ):
            raise ValueError(f"there are no such elements in a tensor {list(self.shape)}: {self}")

    @classmethod
    def of(
        cls, shape: Iterable[int], dim: int | None = None, first: int = 0, last: int = 0
    ) -> "Extent":
        """Return all of a block, or of the whole tensor."""
        nothing = cls(tuple(shape), dim, first, last, 0, 0)
        return replace(nothing, stop=prod(nothing.block_shape))

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.last - self.first, *self.shape[self.dim + 1 :])

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def block(self) -> tuple[int | None, int, int]:
        """Which block it is: two extents of one block number its elements alike."""
        return self.dim, self.first, self.last

    @property
    def row(self) -> tuple[int, int, int]:
        """The matrix in which the block is some columns: the length of a row, the first column, how
        many columns.
        """
        if self.dim is None or not self.count:
            return 1, 0, 1  # each element is a row
        behind = prod(self.shape[self.dim + 1 :])
        return self.shape[self.dim] * behind, self.first * behind, (self.last - self.first) * behind

    def straight(self) -> "Extent":
        """Return the same elements as a range of the whole tensor, flattened, if the block is one;
        otherwise `self`.
        """
        length, column, width = self.row
        if self.dim is None or (prod(self.shape[: self.dim]) != 1 and width != length):
            return self
        return Extent(
            self.shape,
            None,
            0,
            0,
            self.start + column,
            self.stop + column,
        )

    def span(self) -> tuple[int, int]:
        """Return where these elements begin and end in the whole tensor, flattened; there must be
        at least one.
        """
        length, column, width = self.row
        begin, end = (
            (at // width) * length + column + at % width for at in (self.start, self.stop - 1)
        )
        return begin, end + 1


class Piece(NamedTuple):
    """What a rank holds of a named tensor: flat [extent.count], or in the block's shape if it is
    the whole block.
    """

    name: str
    extent: Extent
    tensor: Tensor


# ---------------------------------------------------------------- cutting and pasting


def take(whole: Tensor, extent: Extent) -> Tensor:
    """Return a copy of these elements of a whole tensor: [extent.count]."""
    rows, inside = _rows(whole, extent)
    return rows.flatten()[inside].clone()


def put(values: Tensor, extent: Extent, whole: Tensor) -> None:
    """Write the elements [extent.count] to their places in a whole tensor, which is contiguous."""
    rows, inside = _rows(whole, extent)
    filled = rows.clone().flatten()
    filled[inside] = values
    rows.copy_(filled.view(rows.shape))


def _rows(whole: Tensor, extent: Extent) -> tuple[Tensor, slice]:
    """Return the rows of the block that have some of the elements, and where these are in it,
    flattened.
    """
    length, column, width = extent.row
    first, last = extent.start // width, -(-extent.stop // width)
    rows = whole.reshape(-1, length)[first:last, column : column + width]
    return rows, slice(extent.start - first * width, extent.stop - first * width)


# ---------------------------------------------------------------- putting together


def touching(one: Extent, other: Extent) -> bool:
    """Tell whether two extents of a tensor may share an element. False is certain; True is not."""
    if not one.count or not other.count:
        return False
    if (
        one.dim == other.dim
        and one.dim is not None
        and not (one.first < other.last and other.first < one.last)
    ):
        return False  # two blocks
    (begin, end), (other_begin, other_end) = one.span(), other.span()
    return begin < other_end and other_begin < end


def assemble(wanted: Extent, stored: Sequence[tuple[Extent, Reader]], dtype: torch.dtype) -> Tensor:
    """Return the `wanted` elements [wanted.count], read from stored pieces that have each of them
    once.
    """
    goal = wanted.straight()
    needed = [(extent.straight(), read) for extent, read in stored if touching(extent, wanted)]
    if all(run.block == goal.block for run, _ in needed):
        runs = [torch.empty(0, dtype=dtype)]
        for run, read in sorted(needed, key=lambda pair: pair[0].start):
            start, stop = max(run.start, goal.start), min(run.stop, goal.stop)
            runs.append(read(start - run.start, stop - run.start))
        return torch.cat(runs)
    # pages that nothing is pasted into take no memory
    whole = torch.empty(wanted.shape, dtype=dtype)
    for run, read in needed:
        put(read(0, run.count), run, whole)
    return take(whole, wanted)


def flaw(extents: Sequence[Extent]) -> str:
    """Say which elements of a tensor these extents miss or have twice; "" if they have each exactly
    once.

    They must come from one layout: blocks along one dim, each dealt out in flat ranges. Cost:
    sorting them.
    """
    if len({(extent.shape, extent.dim) for extent in extents}) != 1:
        return "its pieces are cut along different dims, or from different shapes"
    shape, dim = extents[0].shape, extents[0].dim
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for extent in extents:
        ranges.setdefault((extent.first, extent.last), []).append((extent.start, extent.stop))
    if dim is not None and (words := _seam(list(ranges), shape[dim])):
        return f"along dim {dim}, {words}"
    for (first, last), parts in ranges.items():
        if words := _seam(parts, Extent.of(shape, dim, first, last).count):
            return (
                f"of {list(shape)}, "
                f"{'' if dim is None else f'dim {dim} from {first} to {last}, '}elements {words}"
            )
    return ""


def _seam(intervals: list[tuple[int, int]], size: int) -> str:
    """Say which part of 0 to `size` is missing or there twice; "" if none is."""
    covered = 0
    for start, stop in [*sorted(intervals), (size, size)]:
        if start > covered:
            return f"{covered} to {start} are missing"
        if start < covered:
            return f"{start} to {min(stop, covered)} are there twice"
        covered = stop
    return ""
