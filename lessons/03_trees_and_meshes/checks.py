"""Lesson 03: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit. Costs are
compared with what the package's own algorithms take on a modelled cluster's virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import broadcast, halving, judge_halving, judge_pairs, judge_tree, pairs
from judges_cost import (
    crossover,
    judge_crossover,
    judge_one_level,
    judge_two_levels,
    one_level,
    two_levels,
)
from judges_levels import judge_levels, levels

from minidist.course.grader.contract import COLLECTIVES, STRATEGIES, Array, Case, Check, Draw, Task

BY_HAND = (*COLLECTIVES, *STRATEGIES)
TREE = Task(1, "binomial tree", BY_HAND)
HALVING = Task(2, "halving and doubling", BY_HAND)
PAIRS = Task(3, "all-to-all", BY_HAND)
LEVELS = Task(4, "two levels", ("minidist.collectives", "minidist.full.collectives.hierarchical"))
COST = Task(
    5,
    "which is fastest",
    (
        *COLLECTIVES,
        "minidist.full.comm.threads_wire.threads_wire",
        "minidist.full.comm.threads_wire.cluster",
    ),
)


def each(make: Callable[..., Case], *sizes: tuple[Any, ...]) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def whole(rng: np.random.Generator, elements: int, dtype: str) -> Array:
    """Draw whole numbers; those of int64 are so large that float64 cannot hold them."""
    return (rng.integers(1, 1000, elements) + (2**53 if dtype == "int64" else 0)).astype(dtype)


def buffers(
    rng: np.random.Generator, ranks: int, elements: int, dtype: str = "float64", **how: int
) -> Case:
    """Draw a buffer of whole numbers for every rank; `how` is told to all."""
    told = {name: np.array(value) for name, value in how.items()}
    given = tuple({"buffer": whole(rng, elements, dtype), **told} for _ in range(ranks))
    said = [
        f"P = {ranks}",
        *(f"{name} {value}" for name, value in how.items()),
        f"n = {elements} of {dtype}",
    ]
    return Case(given, ", ".join(said))


def rooted(rng: np.random.Generator, ranks: int, root: int, dtype: str = "float64") -> Case:
    """Draw buffers, and name a root."""
    return buffers(rng, ranks, int(rng.integers(1, 9)), dtype, root=root)


def nodes(
    rng: np.random.Generator, count: int, ranks: int, elements: int, dtype: str = "float64"
) -> Case:
    """Draw buffers for `count` nodes of `ranks` each."""
    return buffers(rng, count * ranks, elements, dtype, nodes=count)


def chunks(rng: np.random.Generator, ranks: int, dtype: str = "float64") -> Case:
    """Draw a chunk of every rank for every rank, of 1 to 6 elements; all lengths are told to
    all.
    """
    lengths = rng.integers(1, 7, (ranks, ranks))
    given = tuple(
        {"all": whole(rng, lengths[rank].sum(), dtype), "lengths": lengths} for rank in range(ranks)
    )
    return Case(given, f"P = {ranks}, {dtype}")


def questions(rng: np.random.Generator, ranks: int, microseconds: int, gigabytes: int) -> Case:
    """Ask for the cost of four sizes on one cluster, or for its crossover."""
    sizes = 8 * ranks * 8 * np.array([1, *rng.integers(2, 1000 // ranks, 3)])
    given = {"bytes": sizes, "cluster": np.array([ranks, microseconds * 1e-6, gigabytes * 1e9])}
    return Case((given,), f"P = {ranks}, {microseconds} microseconds, {gigabytes} GB/s")


def machines(rng: np.random.Generator, count: int, ranks: int, faster: int) -> Case:
    """Ask for the cost of three sizes on `count` nodes of `ranks` each, whose inner links are
    `faster`.
    """
    sizes = 8 * count * ranks * np.array([1, *rng.integers(2, 4000 // (count * ranks), 2)])
    links = np.array([[2e-6, faster * 1e9], [1e-5, 1e9]])
    label = f"{count} nodes of {ranks}, 2 and 10 microseconds, {faster} and 1 GB/s"
    return Case(({"bytes": sizes, "shape": np.array([count, ranks]), "links": links},), label)


CHECKS = [
    Check(
        TREE, "doubles who has it", 8, each(rooted, (4, 0), (8, 0, "int64")), broadcast, judge_tree
    ),
    Check(
        TREE,
        "any root, any number of ranks",
        5,
        each(rooted, (4, 1), (6, 4), (1, 0)),
        broadcast,
        judge_tree,
    ),
    Check(
        TREE, "the same under mpirun", 3, each(rooted, (3, 1)), broadcast, judge_tree, wire="mpi"
    ),
    Check(
        HALVING,
        "powers of two",
        8,
        each(buffers, (2, 6), (4, 8, "float32"), (8, 16)),
        halving,
        judge_halving,
    ),
    Check(
        HALVING,
        "lengths that do not divide",
        4,
        each(buffers, (4, 7), (4, 2)),
        halving,
        judge_halving,
    ),
    Check(
        HALVING,
        "any number of ranks",
        5,
        each(buffers, (3, 8), (6, 12), (1, 5)),
        halving,
        judge_halving,
    ),
    Check(
        HALVING,
        "the same under mpirun",
        3,
        each(buffers, (3, 10)),
        halving,
        judge_halving,
        wire="mpi",
    ),
    Check(
        PAIRS, "every chunk to its owner", 8, each(chunks, (3,), (4, "int64")), pairs, judge_pairs
    ),
    Check(PAIRS, "two ranks, and one alone", 3, each(chunks, (2,), (1,)), pairs, judge_pairs),
    Check(PAIRS, "the same under mpirun", 3, each(chunks, (3,)), pairs, judge_pairs, wire="mpi"),
    Check(
        LEVELS,
        "lets little cross nodes",
        8,
        each(nodes, (2, 2, 8), (2, 3, 12, "int64")),
        levels,
        judge_levels,
    ),
    Check(
        LEVELS,
        "lengths that do not divide",
        4,
        each(nodes, (2, 2, 7), (3, 2, 4)),
        levels,
        judge_levels,
    ),
    Check(
        LEVELS,
        "one node, or one rank a node",
        2,
        each(nodes, (1, 3, 6), (3, 1, 6)),
        levels,
        judge_levels,
    ),
    Check(
        LEVELS,
        "the same under mpirun",
        3,
        each(nodes, (1, 2, 10)),
        levels,
        judge_levels,
        wire="mpi",
    ),
    Check(
        COST,
        "any number of ranks",
        4,
        each(questions, (8, 5, 2), (6, 10, 1)),
        one_level,
        judge_one_level,
    ),
    Check(
        COST, "two levels", 4, each(machines, (2, 4, 8), (3, 2, 5)), two_levels, judge_two_levels
    ),
    Check(
        COST,
        "broadcast: in parts from when on",
        3,
        each(questions, (8, 10, 1), (2, 10, 1)),
        crossover,
        judge_crossover,
    ),
]

# ---- hidden: other cases of the checks above ----


def drawn(make: Callable[..., Case], *bounds: tuple[int, int]) -> Draw:
    """Draw a case of float32 and one of int64, each number of their size from `low` to `high`."""
    return lambda rng: [
        make(rng, *(int(rng.integers(low, high + 1)) for low, high in bounds), dtype)
        for dtype in ("float32", "int64")
    ]


CHECKS += [
    Check(TREE, "others", 4, drawn(rooted, (5, 8), (0, 4)), broadcast, judge_tree, hidden=True),
    Check(
        HALVING, "others", 5, drawn(buffers, (5, 8), (9, 40)), halving, judge_halving, hidden=True
    ),
    Check(PAIRS, "others", 4, drawn(chunks, (5, 7)), pairs, judge_pairs, hidden=True),
    Check(
        LEVELS,
        "others",
        4,
        drawn(nodes, (2, 3), (2, 3), (13, 40)),
        levels,
        judge_levels,
        hidden=True,
    ),
    Check(
        COST,
        "others",
        2,
        each(questions, (11, 3, 5), (1, 20, 2)),
        one_level,
        judge_one_level,
        hidden=True,
    ),
    Check(
        COST,
        "other levels",
        2,
        each(machines, (4, 3, 3), (1, 3, 4)),
        two_levels,
        judge_two_levels,
        hidden=True,
    ),
    Check(
        COST,
        "from when on",
        1,
        each(questions, (4, 3, 5), (16, 2, 2)),
        crossover,
        judge_crossover,
        hidden=True,
    ),
]
