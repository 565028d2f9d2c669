"""Lesson 01: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit. Tasks 1 to 4
name nothing that is not allowed: no collective sends just these messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import chain, halo, judge_chain, judge_halo, judge_token, token
from judges_plans import farm, judge_farm, judge_stuck, stuck

from minidist.course.grader.contract import COLLECTIVES, Array, Case, Check, Draw, Task

BY_HAND = COLLECTIVES
TOKEN = Task(1, "a token round the ring", BY_HAND)
HALO = Task(2, "halo exchange", BY_HAND)
CHAIN = Task(3, "broadcast along a chain", BY_HAND)
FARM = Task(4, "a master and its workers", BY_HAND)
STUCK = Task(
    5,
    "who never finishes",
    ("minidist.full.comm.threads_wire.threads_wire", "minidist.full.comm.threads_wire.world"),
)


def each(make: Callable[..., Case], *sizes: tuple[Any, ...]) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def whole(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: str) -> Array:
    """Draw whole numbers; those of int64 are so large that float64 cannot hold them."""
    return (rng.integers(1, 1000, shape) + (2**53 if dtype == "int64" else 0)).astype(dtype)


def tokens(rng: np.random.Generator, ranks: int, elements: int, dtype: str = "float64") -> Case:
    """Draw an array of whole numbers for every rank."""
    given = tuple({"own": whole(rng, elements, dtype)} for _ in range(ranks))
    return Case(given, f"P = {ranks}, {elements} elements of {dtype}")


def ring(
    rng: np.random.Generator, ranks: int, least: int, width: int, dtype: str = "float64"
) -> Case:
    """Draw a piece of `least` or up to three elements more for every rank."""
    pieces = [whole(rng, least + int(more), dtype) for more in rng.integers(0, 4, ranks)]
    lengths = ", ".join(str(len(piece)) for piece in pieces)
    given = tuple({"piece": piece, "width": np.array(width)} for piece in pieces)
    return Case(given, f"P = {ranks}, pieces of {lengths}, width {width}, {dtype}")


def chains(
    rng: np.random.Generator,
    ranks: int,
    elements: int,
    root: int,
    pieces: int,
    dtype: str = "float64",
) -> Case:
    """Draw a buffer for every rank, of which only the root's counts."""
    how = {"root": np.array(root), "pieces": np.array(pieces)}
    given = tuple({"buffer": whole(rng, elements, dtype), **how} for _ in range(ranks))
    return Case(
        given, f"P = {ranks}, root {root}, {elements} elements of {dtype} in {pieces} pieces"
    )


def farms(rng: np.random.Generator, ranks: int, rows: int, width: int) -> Case:
    """Draw rows, of which only rank 0's count."""
    given = tuple({"rows": whole(rng, (rows, width), "float64")} for _ in range(ranks))
    return Case(given, f"P = {ranks}, {rows} rows of {width}")


def plans(text: str, label: str = "") -> Case:
    """Read `s1 r1 / s0 r0`, a plan for each rank, into an array [ranks, steps, 2] of kind and peer;
    -1: no step.
    """
    rows = [
        [("sr".index(step[0]), int(step[1:])) for step in row.split()] for row in text.split("/")
    ]
    table = np.full((len(rows), max(map(len, rows)), 2), -1)
    for rank, row in enumerate(rows):
        table[rank, : len(row)] = np.array(row, dtype=int).reshape(-1, 2)
    return Case(({"plans": table},), label or text.strip())


# s: send to, r: receive from
PLANS = ("s1 r2 / s2 r0 / s0 r1", "r2 s1 / r0 s2 / r1 s0", "s1 r2 / r0 s2 / r1 s0")
PLANS += (
    "s1 r1 / r0 s0 / r0",
    "s1 s3 / s2 r0 / s1 / r0",
    "s1 r2 / r0 r0 s2 / r1 s0 / ",
    "s1 / r2 r0 / s1",
)

CHECKS = [
    Check(TOKEN, "goes round once", 7, each(tokens, (2, 1), (3, 4, "int64")), token, judge_token),
    Check(TOKEN, "one rank alone", 2, each(tokens, (1, 3)), token, judge_token),
    Check(TOKEN, "the same under mpirun", 3, each(tokens, (2, 5)), token, judge_token, wire="mpi"),
    Check(
        HALO,
        "takes both neighbours' ends",
        8,
        each(ring, (3, 2, 1), (4, 3, 2, "int64")),
        halo,
        judge_halo,
    ),
    Check(HALO, "both neighbours are the same rank", 4, each(ring, (2, 3, 2)), halo, judge_halo),
    Check(HALO, "one rank alone", 3, each(ring, (1, 4, 2)), halo, judge_halo),
    Check(
        HALO,
        "wide ends under mpirun",
        3,
        each(ring, (2, 100_000, 100_000)),
        halo,
        judge_halo,
        wire="mpi",
    ),
    Check(
        CHAIN,
        "passes every piece on",
        8,
        each(chains, (3, 6, 0, 3), (4, 9, 0, 4, "int64")),
        chain,
        judge_chain,
    ),
    Check(
        CHAIN,
        "from another root, or one rank alone",
        4,
        each(chains, (3, 5, 1, 2), (1, 5, 0, 2)),
        chain,
        judge_chain,
    ),
    Check(
        CHAIN,
        "the same under mpirun",
        3,
        each(chains, (3, 9, 2, 3)),
        chain,
        judge_chain,
        wire="mpi",
    ),
    Check(FARM, "deals out and collects", 6, each(farms, (3, 4, 2), (4, 9, 3)), farm, judge_farm),
    Check(
        FARM,
        "rows left over, few, or none",
        6,
        each(farms, (4, 7, 2), (4, 2, 3), (3, 0, 2)),
        farm,
        judge_farm,
    ),
    Check(FARM, "one rank alone", 2, each(farms, (1, 3, 2)), farm, judge_farm),
    Check(FARM, "the same under mpirun", 3, each(farms, (3, 5, 2)), farm, judge_farm, wire="mpi"),
    Check(
        STUCK,
        "rings, and who gets through",
        14,
        lambda rng: [plans(text) for text in PLANS],
        stuck,
        judge_stuck,
    ),
]

# ---- hidden: other cases of the checks above ----


def any_tokens(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts and lengths, of other dtypes."""
    return [
        tokens(rng, *rng.integers((4, 1), (8, 30)).tolist(), dtype)
        for dtype in ("float32", "int64")
    ]


def any_rings(rng: np.random.Generator) -> list[Case]:
    """Draw a width as long as the shortest pieces may be, on several ranks and on two."""
    width = int(rng.integers(2, 6))
    return [
        ring(rng, ranks, width, width, dtype)
        for ranks, dtype in ((int(rng.integers(5, 8)), "int64"), (2, "float32"))
    ]


def any_chains(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts, roots and pieces; with as many pieces as elements, too."""
    sizes = [
        (int(rng.integers(3, 7)), int(rng.integers(2, 8)), more)
        for more in (0, int(rng.integers(1, 9)))
    ]
    return [
        chains(rng, ranks, pieces + more, int(rng.integers(1, ranks)), pieces)
        for ranks, pieces, more in sizes
    ]


def any_farms(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts and rows."""
    return [farms(rng, *rng.integers((2, 6), (7, 20)).tolist(), 3) for _ in range(2)]


def any_plans(rng: np.random.Generator) -> list[Case]:
    """Draw messages in an order that works; then reverse the end of some plans."""
    cases = []
    for damaged in (0, 1, 1, 2):
        ranks = int(rng.integers(4, 7))
        rows: list[list[str]] = [[] for _ in range(ranks)]
        for _ in range(3 * ranks):
            sender, receiver = rng.choice(ranks, 2, replace=False).tolist()
            rows[sender].append(f"s{receiver}")
            rows[receiver].append(f"r{sender}")
        for rank in range(damaged):
            rows[rank][-3:] = reversed(rows[rank][-3:])
        text = " / ".join(" ".join(row) for row in rows)
        cases.append(plans(text, f"P = {ranks}, {damaged} of them out of order"))
    return cases


CHECKS += [
    Check(TOKEN, "other sizes and rank counts", 4, any_tokens, token, judge_token, hidden=True),
    Check(HALO, "other sizes and rank counts", 6, any_rings, halo, judge_halo, hidden=True),
    Check(
        CHAIN, "other sizes, roots and rank counts", 5, any_chains, chain, judge_chain, hidden=True
    ),
    Check(FARM, "other sizes and rank counts", 5, any_farms, farm, judge_farm, hidden=True),
    Check(STUCK, "other plans", 4, any_plans, stuck, judge_stuck, hidden=True),
]
