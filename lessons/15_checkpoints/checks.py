"""Lesson 15: what is checked, and for how many points."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from judges import (
    answered,
    dealt,
    judge_answered,
    judge_dealt,
    judge_loaded,
    judge_resumed,
    judge_saved,
    loaded,
    resumed,
    saved,
)

from minidist.course.grader.contract import Case, Check, Draw, Task

BY_HAND = ("minidist.trainer", "minidist.parallel")
PIECES = Task(1, "who writes what", BY_HAND)
SAVE = Task(2, "all of it or nothing", BY_HAND, may_use=("comm.roll_call",))
LOAD = Task(3, "into another layout", BY_HAND)
RESUME = Task(4, "all that a run is", BY_HAND)
CADENCE = Task(5, "how often", BY_HAND)


def each(make: Callable[..., Case], *shapes: tuple[Any, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def spread(rng: np.random.Generator, dp: int, tp: int) -> Case:
    """Draw a tensor of each kind, and one with fewer elements than dp has ranks: (rows, columns, cut, sliced)."""
    rows, columns = tp * rng.integers(1, 4, 4), rng.integers(1, 6, 4)
    table = np.c_[[*rows, 1], [*columns, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1, 1]]
    return Case(({"sizes": np.array([dp, tp]), "tensors": table},) * (dp * tp), f"dp={dp} tp={tp}")


def pieces(
    rng: np.random.Generator, writers: int, litter: int = 0, idle: int = 0, ahead: int = 0, again: int = 0
) -> Case:
    """Deal a tensor out to `writers`; `idle` ranks have nothing. `litter`: what a killed run has left.

    Rank `ahead` runs ahead of the others; `again`: there is a checkpoint of this step already.
    """
    whole, ranks = rng.normal(size=(rng.integers(writers, 9),)), writers + idle
    cuts = [len(whole) * min(rank, writers) // writers for rank in range(ranks + 1)]
    shared = {"facts": np.array([len(whole), litter, again, ahead])}
    given = tuple({**shared, "start": np.array(a), "w": whole[a:b]} for a, b in pairwise(cuts))
    label = f"{ranks} ranks{', after a crash' * litter}{', one with nothing' * idle}{', the step is there' * again}"
    return Case(given, label + f", rank {ahead} ahead" * (ranks > 1))


def layouts(rng: np.random.Generator, stored: int, wanted: int, flaw: int = 0) -> Case:
    """Cut a tensor for `stored` ranks, shuffled, and ask for it on `wanted` ranks; `flaw` spoils the index."""
    size = int(rng.integers(20, 40))
    cuts = np.sort(np.r_[0, rng.choice(np.arange(1, size), stored - 1, replace=False), size])
    parts = np.c_[cuts[:-1], cuts[1:], np.arange(stored)]
    if flaw in (1, 2):
        parts[-1, 0] += 3 - 2 * flaw
    elif flaw == 3:
        parts[-2, :2] += 1
    shared = {"parts": rng.permutation(parts), "whole": rng.normal(size=size), "flaw": np.array(flaw)}
    given = tuple({**shared, "wanted": np.array([size * r, size * (r + 1)]) // wanted} for r in range(wanted))
    words = ("", ", one element missing", ", one element twice", ", a piece shifted", ", nothing stored")
    return Case(given, f"{stored} files for {wanted}{words[flaw]}")


def resumption(rng: np.random.Generator, before: int, after: int) -> Case:
    """Draw a seed."""
    return Case(({"facts": np.array([before, after, rng.integers(1 << 30)])},), f"{before} steps, then {after}")


def failures(rng: np.random.Generator, cases: int) -> Case:
    """Ask for (compute, write, mtbf, restart), and ranks."""
    times = rng.uniform((100, 5, 1e3, 0), (900, 90, 1e4, 500), (cases, 4))
    return Case(({"times": times, "ranks": rng.integers(1, 2000, cases)},), f"{cases} questions")


FLAWED = ((3, 1, 1), (3, 3, 2), (3, 2, 3), (2, 1, 4))
CHECKS = [
    Check(PIECES, "replicas, blocks, slices", 9, each(spread, (2, 1), (1, 2), (2, 2)), dealt, judge_dealt),
    Check(PIECES, "the same under mpirun", 3, each(spread, (2, 1)), dealt, judge_dealt, wire="mpi"),
    Check(SAVE, "one rank", 6, each(pieces, (1,)), saved, judge_saved),
    Check(SAVE, "several ranks", 8, each(pieces, (2,), (3, 0, 0, 2)), saved, judge_saved),
    Check(SAVE, "after a killed run", 5, each(pieces, (2, 1)), saved, judge_saved),
    Check(SAVE, "the step is there already", 2, each(pieces, (2, 0, 0, 0, 1)), saved, judge_saved),
    Check(SAVE, "the same under mpirun", 4, each(pieces, (2, 1)), saved, judge_saved, wire="mpi"),
    Check(LOAD, "other numbers of ranks", 11, each(layouts, (2, 3), (3, 2), (4, 1)), loaded, judge_loaded),
    Check(LOAD, "an index that is wrong", 4, each(layouts, *FLAWED), loaded, judge_loaded),
    Check(RESUME, "as if nothing had happened", 12, each(resumption, (4, 6), (1, 3)), resumed, judge_resumed),
    Check(CADENCE, "interval and shares", 8, each(failures, (3,)), answered, judge_answered),
]

# ---- hidden: the handout ends here ----

CHECKS += [
    Check(PIECES, "other meshes", 6, each(spread, (3, 2), (2, 3)), dealt, judge_dealt, hidden=True),
    Check(SAVE, "other ranks", 7, each(pieces, (4, 0, 0, 1), (2, 1, 1)), saved, judge_saved, hidden=True),
    Check(LOAD, "other layouts", 5, each(layouts, (5, 4), (2, 6)), loaded, judge_loaded, hidden=True),
    Check(RESUME, "other seeds", 6, each(resumption, (7, 9)), resumed, judge_resumed, hidden=True),
    Check(CADENCE, "other questions", 4, each(failures, (5,)), answered, judge_answered, hidden=True),
]
