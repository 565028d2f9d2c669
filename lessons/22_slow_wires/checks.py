"""Lesson 22: what is checked, and for how many points. Tasks 1 and 2 have ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import judge_bytes, judge_sums, summed, told_apart
from judges_old import (
    BACKWARD,
    UPDATE,
    aged,
    judge_old,
    judge_rates,
    rated,
    row_of,
    rows_told_apart,
)
from judges_outer import judge_silence, judge_steps, met

from minidist.course.grader.contract import STRATEGIES, Array, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, "minidist.plan", "torch.distributed")
FEWER_BYTES = Task(1, "fewer bytes", BY_HAND)
FEWER_MEETINGS = Task(2, "fewer meetings", BY_HAND)
NO_WAITING = Task(3, "no waiting", BY_HAND)

# ---------------------------------------------------------------- cases

# tries to draw a case in which the commonest mistakes give something else than what is right, so
# that an answer has the same points with each seed
MOST = 300


def each(make: Callable[..., Case], *shapes: tuple[Any, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def gradients(
    rng: np.random.Generator,
    ranks: int,
    size: int,
    count: int,
    steps: int,
    dtype: str = "float64",
    same: bool = False,
    zeros: bool = False,
) -> Case:
    """Draw gradients. The largest elements change from step to step; smaller ones stay, so that
    they add up. With `same` all ranks have their largest elements at the same places.
    """
    for _ in range(MOST):
        drawn = drawn_gradients(rng, ranks, size, count, steps, same, zeros).astype(dtype)
        if count == size or zeros or told_apart(drawn, count):
            break
    given = [{"gradients": each, "count": np.array(count)} for each in drawn]
    label = f"{ranks} ranks, n={size}, k={count}, {dtype}"
    label += ", the same places" * same + ", most elements are 0" * zeros
    return Case(tuple(given), label)


def drawn_gradients(
    rng: np.random.Generator,
    ranks: int,
    size: int,
    count: int,
    steps: int,
    same: bool,
    zeros: bool,
) -> Array:
    """Draw the gradients of all ranks and steps."""
    constant = rng.uniform(0.3, 0.6, (ranks, 1, size)) * rng.choice((-1, 1), (ranks, 1, size))
    drawn: Array = constant + 0.1 * rng.normal(size=(ranks, steps, size))
    for step in range(steps):
        places = rng.choice(size, min(size, count + 1), replace=False)
        for rank in range(ranks):
            if not same:
                places = rng.choice(size, min(size, count + 1), replace=False)
            signs = rng.choice((-1, 1), len(places))
            signs[:2] = -1, 1
            drawn[rank, step, places] = signs[: len(places)] * rng.uniform(2, 3, len(places))
    if zeros:
        drawn = -np.abs(drawn)
        drawn[:, :, rng.permutation(size)[1:]] = 0
    return drawn


def meetings(
    rng: np.random.Generator,
    sites: int,
    every: int,
    steps: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    sizes: tuple[int, ...] = (3, 5),
) -> Case:
    """Draw parameters, and for each site and step where its inner optimizer wants to go."""
    shared: dict[str, Any] = {"sizes": np.array(sizes), "parameters": rng.normal(size=sum(sizes))}
    shared |= {"every": np.array(every), "lr": np.array(lr), "momentum": np.array(momentum)}
    given = [{**shared, "targets": rng.normal(1, 2, (steps, sum(sizes)))} for _ in range(sites)]
    return Case(tuple(given), f"{sites} sites, H={every}, lr={lr:g}, momentum={momentum:g}")


def stage(rng: np.random.Generator, warm_up: int, batches: int, batch: int = 1) -> Case:
    """Ask about a stage of 1F1B that has `warm_up` stages behind it; it is never flushed."""
    count = batches * batch
    row = list(range(min(warm_up, count)))
    for backward in range(count):
        if warm_up + backward < count:
            row.append(warm_up + backward)
        row.append(BACKWARD + backward)
        if (backward + 1) % batch == 0:
            row.append(UPDATE)
    given = {"row": np.array(row), "batch": np.array(batch)}
    return Case((given,), f"1F1B, {warm_up} stages behind this one")


def any_row(rng: np.random.Generator, in_flight: int, batches: int, batch: int) -> Case:
    """Ask about a row of words in an order that nobody would plan."""
    for _ in range(MOST):
        row = drawn_row(rng, in_flight, batches * batch, batch)
        if rows_told_apart(row_of(row), batch):
            break
    given = {"row": np.array(row), "batch": np.array(batch)}
    return Case((given,), f"any order, at most {in_flight} in flight")


def drawn_row(rng: np.random.Generator, in_flight: int, count: int, batch: int) -> list[int]:
    """Draw forwards and backwards in any order, with at most so many microbatches in flight."""
    row, forward, backward = list[int](), 0, 0
    while backward < count:
        room = forward < min(count, backward + in_flight)
        if room and (forward == backward or rng.random() < 0.6):
            row.append(forward)
            forward += 1
            continue
        row.append(BACKWARD + backward)
        backward += 1
        if backward % batch == 0:
            row.append(UPDATE)
    return row


def parabolas(rng: np.random.Generator, *delays: int) -> Case:
    """Ask for the largest learning rate of some delays."""
    asked = np.array([(rng.uniform(0.2, 5), delay) for delay in delays])
    return Case(({"asked": asked},), f"delays {', '.join(map(str, delays))}")


SPARSE = (
    (1, 6, 2, 3),
    (2, 8, 1, 4),
    (4, 12, 3, 5),
    (3, 10, 2, 5, "float64", True),
    (3, 9, 2, 5, "float32"),
    (2, 5, 5, 2),
    (2, 7, 3, 3, "float64", False, True),
)
SITES = (
    (2, 3, 7),
    (4, 2, 6),
    (3, 4, 9, 0.5, 0.6),
    (2, 1, 3),
    (3, 2, 5, 1.0, 0.0),
    (1, 2, 4),
)
# (stages behind, batches, microbatches of a batch)
STAGES = ((2, 5), (0, 3), (3, 4, 2), (1, 3, 3), (5, 3))
CHECKS = [
    Check(
        FEWER_BYTES,
        "what arrives and what is kept",
        22,
        each(gradients, *SPARSE),
        summed,
        judge_sums,
    ),
    Check(
        FEWER_BYTES,
        "its bytes",
        5,
        each(
            gradients,
            (4, 70, 5, 2),
            (3, 90, 4, 2, "float32"),
            (3, 30, 4, 2, "float64", False, True),
        ),
        summed,
        judge_bytes,
    ),
    Check(
        FEWER_BYTES,
        "the same under mpirun",
        3,
        each(gradients, (3, 10, 2, 4)),
        summed,
        judge_sums,
        wire="mpi",
    ),
    Check(FEWER_MEETINGS, "the outer step", 20, each(meetings, *SITES), met, judge_steps),
    Check(
        FEWER_MEETINGS,
        "silence between meetings",
        6,
        each(meetings, (3, 3, 7), (2, 2, 5)),
        met,
        judge_silence,
    ),
    Check(
        FEWER_MEETINGS,
        "the same under mpirun",
        4,
        each(meetings, (3, 2, 5)),
        met,
        judge_steps,
        wire="mpi",
    ),
    Check(NO_WAITING, "1F1B without a flush", 8, each(stage, *STAGES), aged, judge_old),
    Check(
        NO_WAITING,
        "any order",
        6,
        each(any_row, (4, 6, 1), (6, 5, 2), (12, 6, 3), (5, 8, 1)),
        aged,
        judge_old,
    ),
    Check(
        NO_WAITING,
        "the largest learning rate",
        8,
        each(parabolas, (1, 2), (3,), (4, 7)),
        rated,
        judge_rates,
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        FEWER_BYTES,
        "other ranks and sizes",
        6,
        each(gradients, (5, 11, 4, 6), (6, 7, 1, 7, "float32", True)),
        summed,
        judge_sums,
        hidden=True,
    ),
    Check(
        FEWER_MEETINGS,
        "other sites and sizes",
        6,
        each(meetings, (5, 3, 10, 0.9, 0.4, (2, 1, 6)), (2, 5, 11)),
        met,
        judge_steps,
        hidden=True,
    ),
    Check(
        NO_WAITING,
        "other rows",
        4,
        each(any_row, (6, 7, 2), (3, 9, 1)),
        aged,
        judge_old,
        hidden=True,
    ),
    Check(
        NO_WAITING, "other delays", 2, each(parabolas, (5, 10, 1)), rated, judge_rates, hidden=True
    ),
]
