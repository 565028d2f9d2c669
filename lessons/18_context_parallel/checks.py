"""Lesson 18: what is checked, and for how many points.

Everything is float64. The judges compute with whole sequences, on one rank. Messages of a ring are
counted, a trace tells what an answer's all-to-alls carried, and what `meeting` lets through is held
against positions, pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import judge_forward, judge_memory, run_backward, run_forward
from judges_backward import judge_backward
from judges_meet import KEYS, judge_meet, run_meet
from judges_order import (
    ORDERS,
    expected_positions,
    judge_lengths,
    judge_meeting,
    judge_positions,
    run_meeting,
    run_positions,
)
from judges_step import MATRICES, VOCABULARY, judge_step, run_step
from judges_ulysses import judge_refusal, judge_ulysses, run_refusal, run_ulysses

from minidist.course.grader.contract import Case, Check, Draw, Task

CONTEXT = "minidist.full.context."
THERE = ("blocks", "context_parallel", "gathered", "order", "ring", "ulysses")
BOOK = ("minidist.context", "minidist.tensor")
BY_HAND = (
    *(*BOOK, *(CONTEXT + name for name in THERE)),
    *("minidist.full.adjoint", "torch.distributed"),
)
MEET = Task(1, "meet a block of keys", BY_HAND)
RING = Task(2, "around the ring", BY_HAND)
ORDER = Task(3, "which tokens a rank has", BY_HAND)
ULYSSES = Task(4, "heads for tokens", BY_HAND)
STEP = Task(
    5,
    "a share of the loss",
    (*BOOK, CONTEXT + "context_parallel", CONTEXT + "order", "torch.distributed"),
)

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *sizes: Any) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def blocks(rng: np.random.Generator, heads: int, groups: int, large: float = 1.0) -> Case:
    """Draw queries, and the keys of all blocks; scores grow with `large`."""
    shapes = {
        "query": (2, heads, KEYS[1], 5),
        "key": (2, groups, KEYS[-1], 5),
        "value": (2, groups, KEYS[-1], 5),
    }
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    given["query"] *= large
    label = f"{heads} heads, {groups} of keys" + (f", scores of {1000:,}" if large > 1 else "")
    return Case((given,), label)


def ring(
    rng: np.random.Generator,
    ranks: int,
    heads: int,
    groups: int,
    own: int,
    head_dim: int = 3,
    batch: int = 2,
) -> Case:
    """Draw queries, keys and values [B, heads, T, d], the same for every rank."""
    counts = {"query": heads, "key": groups, "value": groups, "gradient": heads}
    given = {
        name: rng.normal(size=(batch, count, own * ranks, head_dim))
        for name, count in counts.items()
    }
    return Case(
        (given,) * ranks, f"P = {ranks}, {heads} heads, {groups} of keys, {own * ranks} tokens"
    )


def lengths(rng: np.random.Generator, ranks: int, own: int) -> Case:
    """Ask for all positions."""
    return Case(
        ({"ranks": np.array(ranks), "time": np.array(ranks * own)},),
        f"P = {ranks}, {ranks * own} tokens",
    )


def met(rng: np.random.Generator, order: str, ranks: int, own: int) -> Case:
    """Ask who meets whom."""
    given = {
        "order": np.array(ORDERS.index(order)),
        "ranks": np.array(ranks),
        "time": np.array(own),
    }
    return Case((given,), f"{order}, P = {ranks}, {own} tokens each")


def everyones(order: str, ranks: int, time: int) -> np.ndarray[Any, Any]:
    """Return the positions of the tokens of all ranks, rank by rank."""
    return np.concatenate([expected_positions(order, ranks, rank, time) for rank in range(ranks)])


def heads(
    rng: np.random.Generator, order: str, ranks: int, heads: int, groups: int, own: int
) -> Case:
    """Draw queries, keys and values of tokens in some order."""
    case = ring(rng, ranks, heads, groups, own)
    given = {
        **case.given[0],
        "everyones": everyones(order, ranks, own * ranks),
        "ranks": np.array(ranks),
    }
    return Case((given,) * ranks, f"{case.label}, {order}")


def nothing(rng: np.random.Generator, ranks: int) -> Case:
    """Give nothing: the program asks for what is to be refused."""
    return Case(({"ranks": np.array(ranks)},) * ranks, f"P = {ranks}")


def batch(rng: np.random.Generator, order: str, ranks: int, own: int) -> Case:
    """Draw rows of different lengths, and the weights of a model."""
    time = own * ranks
    tokens = rng.integers(1, VOCABULARY, (3, time + 1))
    for row, length in enumerate((time + 1, time // 2 + 1, own + 2)):
        tokens[row, length:] = 0
    given = {name: rng.normal(size=shape) for name, shape in MATRICES.items()}
    given |= {
        "tokens": tokens,
        "everyones": everyones(order, ranks, time),
        "order": np.array(ORDERS.index(order)),
    }
    return Case((given,) * ranks, f"P = {ranks}, {time} tokens, {order}")


# ---------------------------------------------------------------- the checks

RINGS = (2, 2, 2, 3), (3, 4, 2, 2), (4, 4, 1, 2)
SHARED = ("contiguous", 2, 4, 2, 3), ("zigzag", 2, 2, 2, 4), ("striped", 4, 8, 2, 2)
STEPS = ("contiguous", 2, 4), ("zigzag", 2, 4), ("striped", 3, 4)

CHECKS = [
    Check(MEET, "as over all keys at once", 10, each(blocks, (2, 2), (4, 2)), run_meet, judge_meet),
    Check(MEET, "scores of a thousand", 4, each(blocks, (2, 1, 1000.0)), run_meet, judge_meet),
    Check(RING, "forward as on one rank", 12, each(ring, *RINGS), run_forward, judge_forward),
    Check(
        RING,
        "a few blocks are held",
        4,
        each(ring, (12, 1, 1, 2, 16, 1)),
        run_forward,
        judge_memory,
    ),
    Check(RING, "backward as on one rank", 16, each(ring, *RINGS), run_backward, judge_backward),
    Check(
        RING,
        "forward under mpirun",
        2,
        each(ring, (2, 2, 1, 2)),
        run_forward,
        judge_forward,
        wire="mpi",
    ),
    Check(
        RING,
        "backward under mpirun",
        2,
        each(ring, (2, 2, 1, 2)),
        run_backward,
        judge_backward,
        wire="mpi",
    ),
    Check(ORDER, "positions", 5, each(lengths, (2, 4), (3, 4)), run_positions, judge_positions),
    Check(
        ORDER,
        "lengths that do not come out even",
        1,
        each(lengths, (2, 4)),
        run_positions,
        judge_lengths,
    ),
    Check(
        ORDER,
        "who meets whom",
        9,
        each(met, ("contiguous", 3, 4), ("zigzag", 3, 4), ("striped", 3, 4)),
        run_meeting,
        judge_meeting,
    ),
    Check(
        ULYSSES,
        "heads that cannot be shared out",
        2,
        each(nothing, (2,), (3,)),
        run_refusal,
        judge_refusal,
    ),
    Check(
        ULYSSES, "as attention on one rank", 10, each(heads, *SHARED), run_ulysses, judge_ulysses
    ),
    Check(
        ULYSSES,
        "the same under mpirun",
        2,
        each(heads, SHARED[1]),
        run_ulysses,
        judge_ulysses,
        wire="mpi",
    ),
    Check(STEP, "loss and gradients as on one rank", 9, each(batch, *STEPS), run_step, judge_step),
    Check(
        STEP, "the same under mpirun", 1, each(batch, STEPS[1]), run_step, judge_step, wire="mpi"
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(MEET, "other sizes", 1, each(blocks, (6, 2)), run_meet, judge_meet, hidden=True),
    Check(
        RING,
        "forward on other ranks",
        2,
        each(ring, (1, 2, 2, 3), (5, 3, 1, 1)),
        run_forward,
        judge_forward,
        hidden=True,
    ),
    Check(
        RING,
        "backward on other ranks",
        2,
        each(ring, (1, 2, 2, 3), (5, 3, 1, 1)),
        run_backward,
        judge_backward,
        hidden=True,
    ),
    Check(
        ORDER,
        "other positions",
        1,
        each(lengths, (1, 2), (5, 2)),
        run_positions,
        judge_positions,
        hidden=True,
    ),
    Check(
        ORDER,
        "other meetings",
        2,
        each(met, ("zigzag", 5, 2), ("striped", 4, 1)),
        run_meeting,
        judge_meeting,
        hidden=True,
    ),
    Check(
        ULYSSES,
        "other sizes",
        2,
        each(heads, ("zigzag", 3, 6, 3, 2)),
        run_ulysses,
        judge_ulysses,
        hidden=True,
    ),
    Check(STEP, "other sizes", 1, each(batch, ("zigzag", 3, 2)), run_step, judge_step, hidden=True),
]
