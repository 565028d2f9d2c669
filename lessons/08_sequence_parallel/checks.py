"""Lesson 08: what is checked, and for how many points.

Everything is float64. The judges compute with whole sequences, on one rank; a trace tells which
collectives an answer called in forward and in backward. What autograd saves is counted. Values of
tasks 1 and 3 are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import border, judge_block, judge_border, judge_partial, run_block, run_partial

from minidist.course.grader.contract import STRATEGIES, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, "torch.distributed")
BORDERS = Task(1, "gather and scatter tokens", BY_HAND)
BLOCK = Task(2, "a block on split tokens", BY_HAND)
PARTIAL = Task(3, "gradients that are a part", BY_HAND)

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *sizes: Any) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def tokens(rng: np.random.Generator, ranks: int, own: int) -> Case:
    """Draw whole numbers [B, T, D]: on each rank other tokens, and other gradients."""
    drawn = rng.integers(-99, 99, (ranks, 2, 2, own * ranks, 3)).astype(float)
    return Case(
        tuple({"x": x, "gradient": gradient} for x, gradient in drawn),
        f"P = {ranks}, {own * ranks} tokens",
    )


def block(rng: np.random.Generator, ranks: int, own: int) -> Case:
    """Draw a block of 16 channels, and 4 a rank inside, the same for every rank."""
    shapes = {"norm.weight": 16, "up.weight": (4 * ranks, 16), "up.bias": 4 * ranks}
    shapes |= {"down.weight": (16, 4 * ranks), "down.bias": 16}
    shapes |= {"x": (2, own * ranks, 16), "gradient": (2, own * ranks, 16)}
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return Case((given,) * ranks, f"P = {ranks}, {own * ranks} tokens")


def partial(rng: np.random.Generator, ranks: int, hidden: int) -> Case:
    """Draw whole numbers as gradients: on each rank others."""
    shapes = {
        "norm.weight": hidden,
        "up.weight": (2, hidden),
        "up.bias": 2,
        "down.weight": (hidden, 2),
    }
    shapes |= {"down.bias": hidden}
    drawn = (
        {name: rng.integers(-99, 99, shape).astype(float) for name, shape in shapes.items()}
        for _ in range(ranks)
    )
    return Case(tuple(drawn), f"P = {ranks}, {hidden} channels")


# ---------------------------------------------------------------- the checks


GATHER, SCATTER = (
    (border(name), judge_border(name[0] == "g")) for name in ("gather_tokens", "scatter_tokens")
)

CHECKS = [
    Check(
        BORDERS, "all tokens, then a slice of the sum", 10, each(tokens, (2, 2), (4, 1)), *GATHER
    ),
    Check(
        BORDERS, "a slice of the sum, then all tokens", 10, each(tokens, (2, 2), (4, 1)), *SCATTER
    ),
    Check(BORDERS, "the first under mpirun", 4, each(tokens, (2, 2)), *GATHER, wire="mpi"),
    Check(BLOCK, "as the whole block", 28, each(block, (2, 2), (4, 2)), run_block, judge_block),
    Check(
        BLOCK, "the same under mpirun", 4, each(block, (2, 2)), run_block, judge_block, wire="mpi"
    ),
    Check(
        PARTIAL,
        "sums what is a part, and nothing else",
        18,
        each(partial, (2, 3), (4, 5)),
        run_partial,
        judge_partial,
    ),
    Check(
        PARTIAL,
        "the same under mpirun",
        4,
        each(partial, (2, 3)),
        run_partial,
        judge_partial,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        BORDERS, "gathering on other ranks", 4, each(tokens, (1, 3), (3, 2)), *GATHER, hidden=True
    ),
    Check(
        BORDERS, "scattering on other ranks", 4, each(tokens, (1, 3), (3, 2)), *SCATTER, hidden=True
    ),
    Check(
        BLOCK, "other sizes", 8, each(block, (1, 3), (3, 1)), run_block, judge_block, hidden=True
    ),
    Check(
        PARTIAL,
        "other sizes",
        6,
        each(partial, (1, 2), (3, 4)),
        run_partial,
        judge_partial,
        hidden=True,
    ),
]
