"""Lesson 14, task 1: the judge of coordinates, groups and communicators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from judges import groups_of, named

from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

FIRST = "ranks count up along the first axis first"


def judge_placed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Coordinates are digits, a group is a slice, and a communicator is a group."""
    sizes = case.given[0]["sizes"].tolist()
    places = [result["place"].tolist() for result in results]
    for rank, found in enumerate(places):
        if found != (place := digits(rank, sizes)):
            says = (
                f"coordinates({rank}, {named(sizes)}) are "
                f"{dict(zip(named(sizes), found, strict=True))}"
            )
            ways = {
                clause: [way(each, sizes) for each in range(prod(sizes))]
                for clause, way in PLACES.items()
            }
            raise Wrong(
                f"{says}, expected "
                f"{dict(zip(named(sizes), place, strict=True))}{known(ways, places.__eq__)}"
            )
    right = groups_of(sizes)
    for number, axis in enumerate(right):
        groups = [result[f"group {axis}"].tolist() for result in results]
        if groups != right[axis]:
            rank = next(rank for rank, group in enumerate(groups) if group != right[axis][rank])
            says = (
                f"group({axis!r}, {rank}, {named(sizes)}) is {groups[rank]}, expected "
                f"{right[axis][rank]}"
            )
            each = [other_groups(rank, sizes, number) for rank in range(prod(sizes))]
            raise Wrong(
                says
                + known(
                    {clause: [one[clause] for one in each] for clause in each[0]}, groups.__eq__
                )
            )
    for axis in right:
        groups = [result[f"communicator {axis}"].tolist() for result in results]
        if groups != right[axis]:
            rank = next(rank for rank, group in enumerate(groups) if group != right[axis][rank])
            says = (
                f"rank {rank}: the communicator along {axis} has {groups[rank]}, expected "
                f"{right[axis][rank]}"
            )
            by_axis = {
                axis: {
                    f"the color is {clause}": [
                        alike(each, sizes, color) for each in range(prod(sizes))
                    ]
                    for clause, color in colors(sizes, place).items()
                }
                | {FIRST: groups_of(sizes, "F")[axis]}
                for place, axis in enumerate(right)
            }
            every = {
                axis: [result[f"communicator {axis}"].tolist() for result in results]
                for axis in right
            }
            # What fits along all axes is more likely than along one.
            ways = {
                clause: way
                for clause, way in by_axis[axis].items()
                if all(by_axis[other].get(clause) == every[other] for other in right)
            } or by_axis[axis]
            more = {*groups[rank]} > {*right[axis][rank]}
            rest = {
                "several groups have the same color": more,
                "ranks of one group have different colors": not more,
            }
            raise Wrong(says + (known(ways, groups.__eq__) or known(rest, bool)))
    splits = sum(note.kind == "split" for note in notes)
    if splits > len(results) * len(sizes):
        raise Wrong(
            f"{splits} splits for {len(results) * len(sizes)} communicators: each calls "
            "comm.split once"
        )
    if sent := [note for note in notes if note.kind == "send" and note.line]:
        raise Wrong(
            f"rank {sent[0].rank} sent a message to make a communicator ({sent[0].line}), "
            "expected none"
        )


def digits(rank: int, sizes: Sequence[int], exchanged: bool = False) -> list[int]:
    """Return the coordinates of a rank, or what a slip makes of them."""
    places: list[int] = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        rank, place = (place, rank) if exchanged else (rank, place)
        places.insert(0, place)
    return places


PLACES: dict[str, Callable[[int, Sequence[int]], list[int]]] = {
    FIRST: lambda rank, sizes: [*map(int, np.unravel_index(rank, sizes, order="F"))],
    "they count from 1": lambda rank, sizes: [each + 1 for each in digits(rank, sizes)],
    "remainders are taken of the rank itself, not of what inner axes leave": lambda rank, sizes: [
        rank % n for n in sizes
    ],
    "the axes are named in the reverse order": lambda rank, sizes: digits(rank, sizes)[::-1],
    "quotient and remainder are exchanged": lambda rank, sizes: digits(rank, sizes, exchanged=True),
    "quotients are not taken modulo the size of their axis": lambda rank, sizes: [
        rank // prod(sizes[number + 1 :]) for number in range(len(sizes))
    ],
    "the rank is divided by the size of its own axis, not by those inside": lambda rank, sizes: [
        rank // n % n for n in sizes
    ],
}


def other_groups(rank: int, sizes: Sequence[int], number: int) -> dict[str, list[int]]:
    """Return what known mistakes take for the group of a rank along an axis."""
    size, place = sizes[number], np.unravel_index(rank, sizes)[number]
    right, axis = groups_of(sizes)[[*named(sizes)][number]][rank], [*named(sizes)][number]
    inner, outer, own = prod(sizes[number + 1 :]), prod(sizes[:number]), prod(sizes[number:])

    def steps(stride: int, first: int | None = None) -> list[int]:
        begin = rank - int(place) * stride if first is None else first
        return [begin + stride * each for each in range(size)]

    others = [
        other for other in range(prod(sizes)) if np.unravel_index(other, sizes)[number] == place
    ]
    differ = [
        other for other in range(prod(sizes)) if np.unravel_index(other, sizes)[number] != place
    ]
    turned = right.index(rank)
    return {
        "the rank itself is left out": [other for other in right if other != rank],
        "the group begins with the rank itself, and is not in ascending order": right[turned:]
        + right[:turned],
        "it goes on upwards from the rank itself; its place may be in the middle": steps(
            inner, rank
        ),
        "it is in descending order": right[::-1],
        "the places along the axis are returned, not the ranks": [*range(size)],
        "the stride is the product of the sizes from this axis on, its own among them": steps(own),
        "the stride is the product of the sizes outside of this axis, not inside": steps(outer),
        "the stride is 1, as along the last axis": steps(1),
        "the first rank is right, and the others are its neighbours, not a stride apart": [
            right[0] + each for each in range(size)
        ],
        "the stride is the size of this axis": steps(size),
        "the stride is the size of the next axis alone": steps(sizes[(number + 1) % len(sizes)]),
        "the group of rank 0 is returned": groups_of(sizes)[axis][0],
        FIRST: groups_of(sizes, "F")[axis][rank],
        "those are meant that agree along the axis": others,
        "all are meant that differ along the axis, also elsewhere": differ,
    }


def colors(sizes: Sequence[int], number: int) -> dict[str, Callable[[int], int]]:
    """Return what known mistakes pass to `comm.split`, by rank."""
    inner, size = prod(sizes[number + 1 :]), sizes[number]

    def at(rank: int) -> list[int]:
        return [int(each) for each in np.unravel_index(rank, sizes)]

    return {
        "the coordinate on this axis: those who agree there, not those who differ": lambda rank: at(
            rank
        )[number],
        "the sum of the other coordinates: different ones add up to the same": lambda rank: (
            sum(at(rank)) - at(rank)[number]
        ),
        "the product of the other coordinates: 0 of all that have a 0": lambda rank: prod(
            each for axis, each in enumerate(at(rank)) if axis != number
        ),
        "the rank: each has one of its own": lambda rank: rank,
        "the rank divided by the size of the axis, as if its groups were neighbours": lambda rank: (
            rank // size
        ),
        "the rank modulo the size of the axis": lambda rank: rank % size,
        "the rank modulo the stride, which leaves out the axes outside": lambda rank: rank % inner,
        "the rank divided by the stride": lambda rank: rank // inner,
        "the first coordinate": lambda rank: at(rank)[0],
        "the last coordinate": lambda rank: at(rank)[-1],
        "the same for all": lambda rank: 0,
    }


def alike(rank: int, sizes: Sequence[int], color: Callable[[int], int]) -> list[int]:
    """Return the ranks that have the same color as this one."""
    return [other for other in range(prod(sizes)) if color(other) == color(rank)]
