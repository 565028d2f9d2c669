"""Pieces: whatever cut a tensor, any other cut of it can be put together, from no more than is
needed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from math import prod

import pytest
import torch
from torch import Tensor

from minidist.full.checkpoint.pieces import Extent, Reader, assemble, flaw, put, take, touching

SHAPES = [(), (1,), (7,), (4, 6), (6, 4), (1, 8), (8, 1), (3, 4, 5), (2, 1, 3), (5, 0), (1, 6, 4)]


def marks(draw: random.Random, size: int, parts: int) -> list[tuple[int, int]]:
    """Cut 0 to `size` at random, also into nothing."""
    inner = sorted(draw.randint(0, size) for _ in range(parts - 1))
    return list(itertools.pairwise([0, *inner, size]))


def grid(draw: random.Random, shape: tuple[int, ...]) -> list[Extent]:
    """Return a random layout: blocks of tensor parallelism, each dealt out by ZeRO."""
    dim = draw.choice([None, *range(len(shape))])
    blocks = [(0, 0)] if dim is None else marks(draw, shape[dim], draw.randint(1, 4))
    extents = []
    for first, last in blocks:
        size = Extent.of(shape, dim, first, last).count
        extents += [
            Extent(shape, dim, first, last, start, stop)
            for start, stop in marks(draw, size, draw.randint(1, 4))
        ]
    return extents


def counted(whole: Tensor) -> Tensor:
    return torch.arange(prod(whole.shape)).view(whole.shape)


def elements(extent: Extent) -> list[int]:
    """Say which elements are meant, by index arithmetic that shares nothing with the package's."""
    block = torch.arange(prod(extent.shape)).view(extent.shape)
    if extent.dim is not None:
        block = block.index_select(extent.dim, torch.arange(extent.first, extent.last))
    return block.flatten()[extent.start : extent.stop].tolist()


class Shelf:
    """Stored pieces of a tensor that count what is read of them."""

    def __init__(self, whole: Tensor, extents: Iterable[Extent]) -> None:
        self.read: list[tuple[Extent, int]] = []
        self.pieces = [
            (extent, self._reader(extent, take(whole, extent)))
            for extent in extents
            if extent.count
        ]

    def _reader(self, extent: Extent, values: Tensor) -> Reader:
        def read(start: int, stop: int) -> Tensor:
            assert 0 <= start < stop <= len(values)
            self.read.append((extent, stop - start))
            return values[start:stop]

        return read


@pytest.mark.parametrize("seed", range(40))
def test_cutting_pasting_and_putting_together(seed: int) -> None:
    draw = random.Random(seed)
    for shape in SHAPES:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        stored, wanted = grid(draw, shape), grid(draw, shape)
        again = torch.full_like(whole, torch.nan)
        for extent in stored:
            assert take(whole, extent).tolist() == whole.flatten()[elements(extent)].tolist()
            put(take(whole, extent), extent, again)
        assert torch.equal(again, whole)
        for extent in wanted:
            shelf = Shelf(whole, stored)
            assert torch.equal(assemble(extent, shelf.pieces, whole.dtype), take(whole, extent)), (
                extent,
                stored,
            )
            assert all(touching(used, extent) for used, _ in shelf.read)
            assert len({used for used, _ in shelf.read}) == len(shelf.read)  # at most once


@pytest.mark.parametrize("seed", range(20))
def test_what_shares_an_element_touches(seed: int) -> None:
    draw = random.Random(seed)
    for shape in SHAPES:
        for one, other in itertools.product(grid(draw, shape), grid(draw, shape)):
            shared = set(elements(one)) & set(elements(other))
            assert touching(one, other) >= bool(shared)
            if one.dim == other.dim and one.block == other.block:
                assert touching(one, other) == bool(shared)
            if one.count and (one.dim, other.dim) == (1, 1):
                apart = min(one.last, other.last) <= max(one.first, other.first)
                assert not (apart and touching(one, other))


def test_what_a_strided_tensor_has_is_cut_from_it_too() -> None:
    whole = torch.arange(24).view(4, 6).t()  # [6, 4]
    assert take(whole, Extent((6, 4), 1, 1, 3, 1, 4)).tolist() == [12, 7, 13]


# ---------------------------------------------------------------- how much is read


def test_the_same_layout_reads_its_own_piece_only() -> None:
    whole = torch.randn(6, 8)
    layout = [
        Extent((6, 8), 1, first, first + 4, start, start + 12)
        for first in (0, 4)
        for start in (0, 12)
    ]
    for extent in layout:
        shelf = Shelf(whole, layout)
        assemble(extent, shelf.pieces, whole.dtype)
        assert shelf.read == [(extent, 12)]


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_other_flat_shards_of_the_same_blocks_read_just_their_elements(dim: int | None) -> None:
    whole = torch.randn(4, 30)
    blocks = (
        [Extent.of((4, 30))]
        if dim is None
        else [Extent.of((4, 30), dim, first, first + 2) for first in (0, 2)]
    )
    if dim == 1:
        blocks = [Extent.of((4, 30), 1, 0, 13), Extent.of((4, 30), 1, 13, 30)]

    def dealt(parts: int) -> list[Extent]:
        return [
            Extent(b.shape, *b.block, b.count * part // parts, b.count * (part + 1) // parts)
            for b in blocks
            for part in range(parts)
        ]

    for extent in dealt(3):
        shelf = Shelf(whole, dealt(4))
        assemble(extent, shelf.pieces, whole.dtype)
        assert sum(count for _, count in shelf.read) == extent.count and len(shelf.read) == 2


def test_rows_on_other_numbers_of_ranks_read_just_their_elements() -> None:
    whole = torch.randn(12, 5)
    shelf = Shelf(whole, [Extent.of((12, 5), 0, first, first + 3) for first in range(0, 12, 3)])
    assemble(Extent((12, 5), 0, 4, 8, 2, 19), shelf.pieces, whole.dtype)
    assert [count for _, count in shelf.read] == [8, 9]


def test_columns_on_other_numbers_of_ranks_read_the_blocks_that_they_meet() -> None:
    whole = torch.randn(6, 12)
    stored = [
        Extent((6, 12), 1, first, first + 3, start, start + 9)
        for first in range(0, 12, 3)
        for start in (0, 9)
    ]
    shelf = Shelf(whole, stored)
    # of columns 4 to 8 the upper two rows
    assemble(Extent((6, 12), 1, 4, 8, 0, 8), shelf.pieces, whole.dtype)
    assert [extent.block for extent, _ in shelf.read] == [(1, 3, 6), (1, 6, 9)]
    assert all(extent.start == 0 for extent, _ in shelf.read)


# ---------------------------------------------------------------- extents


def test_an_extent_says_what_it_is() -> None:
    extent = Extent((4, 6, 5), 1, 2, 5, 7, 40)
    assert extent.block_shape == (4, 3, 5) and extent.count == 33 and extent.block == (1, 2, 5)
    assert Extent.of((4, 6), 1, 2, 5) == Extent((4, 6), 1, 2, 5, 0, 12)
    assert Extent.of(torch.zeros(()).shape) == Extent((), None, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "fields",
    [
        (None, 1, 1, 0, 2),
        (None, 0, 0, 0, 25),
        (None, 0, 0, -1, 2),
        (None, 0, 0, 3, 2),
        (2, 0, 1, 0, 1),
        (-1, 0, 1, 0, 1),
        (1, 3, 7, 0, 1),
        (1, 3, 2, 0, 0),
        (1, 0, 2, 0, 9),
    ],
)
def test_elements_that_there_are_not_are_refused(
    fields: tuple[int | None, int, int, int, int],
) -> None:
    with pytest.raises(
        ValueError, match=r"there are no such elements in a tensor \[4, 6\]: Extent"
    ):
        Extent((4, 6), *fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------- coverage


@pytest.mark.parametrize("seed", range(40))
def test_a_flaw_is_found_and_none_is_made_up(seed: int) -> None:
    draw = random.Random(seed)
    for shape in [shape for shape in SHAPES if 0 not in shape]:
        extents = [extent for extent in grid(draw, shape) if extent.count]
        draw.shuffle(extents)
        assert flaw(extents) == ""
        spare = draw.randrange(len(extents))
        twice = [*extents, extents[spare]]
        assert "there twice" in flaw(twice)
        if len(extents) > 1:
            assert "are missing" in flaw(extents[:spare] + extents[spare + 1 :])
        other = extents[spare]
        if other.count > 1:
            short = Extent(other.shape, *other.block, other.start, other.stop - 1)
            assert "are missing" in flaw([*extents[:spare], short, *extents[spare + 1 :]])
            assert "there twice" in flaw([*extents, short])


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        (
            [Extent.of((4, 6), 1, 0, 2), Extent.of((4, 6), 1, 3, 6)],
            "along dim 1, 2 to 3 are missing",
        ),
        (
            [Extent.of((4, 6), 1, 0, 4), Extent.of((4, 6), 1, 3, 6)],
            "along dim 1, 3 to 4 are there twice",
        ),
        ([Extent.of((4, 6), 0, 0, 3)], "along dim 0, 3 to 4 are missing"),
        ([Extent((4, 6), None, 0, 0, 2, 24)], "of [4, 6], elements 0 to 2 are missing"),
        (
            [Extent((4, 6), 1, 0, 6, 0, 20), Extent((4, 6), 1, 0, 6, 15, 24)],
            "of [4, 6], dim 1 from 0 to 6, elements 15 to 20 are there twice",
        ),
        (
            [Extent((9,), None, 0, 0, 0, 9), Extent((9,), None, 0, 0, 2, 5)],
            "of [9], elements 2 to 5 are there twice",
        ),
        (
            [Extent.of((4, 6), 1, 0, 6), Extent.of((4, 6), 0, 0, 4)],
            "its pieces are cut along different dims",
        ),
        (
            [Extent.of((4, 6)), Extent.of((6, 4))],
            "its pieces are cut along different dims, or from different shapes",
        ),
    ],
)
def test_a_flaw_is_named(extents: list[Extent], words: str) -> None:
    assert flaw(extents).startswith(words)
