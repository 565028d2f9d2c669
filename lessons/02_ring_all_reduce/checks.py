"""Lesson 02: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit.
"""

from __future__ import annotations

import numpy as np
from judges import (
    edges,
    gather,
    judge_edges,
    judge_gather,
    judge_reduce,
    judge_scatter,
    reduce,
    scatter,
)
from judges_cost import cost, judge_cost

from minidist.course.grader.contract import COLLECTIVES, STRATEGIES, Array, Case, Check, Draw, Task

BY_HAND = (*COLLECTIVES, *STRATEGIES)
SCATTER = Task(1, "ring reduce-scatter", BY_HAND)
GATHER = Task(2, "ring all-gather", BY_HAND)
REDUCE = Task(3, "ring all-reduce", BY_HAND)
COST = Task(4, "its cost", BY_HAND)
DTYPES = ("float32", "int64", "float64")


def whole(rng: np.random.Generator, elements: int, dtype: str) -> Array:
    """Draw whole numbers; those of int64 are so large that float64 cannot hold them."""
    return (rng.integers(1, 1000, elements) + (2**53 if dtype == "int64" else 0)).astype(dtype)


def buffers(*sizes: tuple[int, int], dtype: str = "float64") -> Draw:
    """Draw one case for each (ranks, elements): a buffer of whole numbers for every rank."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple({"buffer": whole(rng, elements, dtype)} for _ in range(ranks)),
                f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {elements} elements of {dtype}",
            )
            for ranks, elements in sizes
        ]

    return draw


def questions(*sizes: tuple[int, int, int]) -> Draw:
    """Ask for the cost of (elements, itemsize, ranks): of every rank, and of one that is alone."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for elements, itemsize, ranks in sizes:
            asked = [[elements, itemsize, ranks, rank] for rank in range(ranks)] + [
                [elements, itemsize, 1, 0]
            ]
            label = f"{elements} elements of {itemsize} bytes on {ranks} ranks"
            cases.append(Case(({"questions": np.array(asked)},), label))
        return cases

    return draw


CHECKS = [
    Check(
        SCATTER, "adds up every chunk", 12, buffers((2, 6), (3, 12), (4, 8)), scatter, judge_scatter
    ),
    Check(
        SCATTER,
        "chunks of unequal length",
        6,
        buffers((3, 10), (5, 3), dtype="int64"),
        scatter,
        judge_scatter,
    ),
    Check(
        SCATTER, "the same under mpirun", 4, buffers((3, 10)), scatter, judge_scatter, wire="mpi"
    ),
    Check(
        GATHER, "passes every chunk on", 9, buffers((2, 6), (3, 12), (4, 8)), gather, judge_gather
    ),
    Check(
        GATHER,
        "chunks of unequal length",
        4,
        buffers((3, 10), (5, 3), dtype="int64"),
        gather,
        judge_gather,
    ),
    Check(
        GATHER,
        "large chunks under mpirun",
        4,
        buffers((3, 300_001)),
        gather,
        judge_gather,
        wire="mpi",
    ),
    Check(REDUCE, "adds up in place", 12, buffers((2, 6), (3, 12), (4, 8)), reduce, judge_reduce),
    Check(
        REDUCE,
        "sizes that do not divide",
        6,
        buffers((3, 10), (4, 7), dtype="int64"),
        reduce,
        judge_reduce,
    ),
    Check(
        REDUCE,
        "fewer elements than ranks; none; one rank alone",
        4,
        buffers((4, 2)),
        edges,
        judge_edges,
    ),
    Check(REDUCE, "the same under mpirun", 4, buffers((4, 10)), reduce, judge_reduce, wire="mpi"),
    Check(
        COST, "counts messages and bytes", 8, questions((12, 8, 4), (10, 4, 3)), cost, judge_cost
    ),
]

# ---- hidden: other cases of the checks above ----


def drawn(cases: int, alone: bool = False) -> Draw:
    """Draw rank counts and sizes as well, of one dtype after the other; and perhaps one rank
    alone.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        found: list[Case] = []
        for dtype in DTYPES[:cases]:
            size = int(rng.integers(2, 8)), int(rng.integers(1, 50))
            found += buffers(size, dtype=dtype)(rng)
        return found + (list(buffers((1, 4))(rng)) if alone else [])

    return draw


def asked(cases: int) -> Draw:
    """Draw questions."""

    def draw(rng: np.random.Generator) -> list[Case]:
        sizes = [
            (int(rng.integers(0, 1000)), int(rng.choice([2, 4, 8])), int(rng.integers(2, 9)))
            for _ in range(cases)
        ]
        return list(questions(*sizes)(rng))

    return draw


CHECKS += [
    Check(
        SCATTER,
        "other sizes and rank counts",
        8,
        drawn(2, alone=True),
        scatter,
        judge_scatter,
        hidden=True,
    ),
    Check(GATHER, "other sizes and rank counts", 6, drawn(2), gather, judge_gather, hidden=True),
    Check(REDUCE, "other sizes and rank counts", 6, drawn(3), reduce, judge_reduce, hidden=True),
    Check(COST, "other sizes", 4, asked(2), cost, judge_cost, hidden=True),
    Check(
        COST, "fewer elements than ranks", 3, questions((2, 8, 4)), cost, judge_cost, hidden=True
    ),
]
