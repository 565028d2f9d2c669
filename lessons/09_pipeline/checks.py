"""Lesson 09: what is checked, and for how many points.

Schedules travel as text, `1F0 1B0`, and are held against the package's checker and simulator, in
the grader's process; gradients against autograd on the whole model. What a rank holds is counted by
hooks on what autograd saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from judges import (
    all_1f1b,
    all_gpipe,
    clock,
    cut,
    judge_1f1b,
    judge_clock,
    judge_cut,
    judge_gpipe,
    packed,
)
from judges_run import LAYERS, ROWS, WIDTH, judge_run, run

from minidist.course.grader.contract import COLLECTIVES, STRATEGIES, Case, Check, Draw, Task
from minidist.full.pipeline import plan

BY_HAND = (*STRATEGIES, *COLLECTIVES, "torch.distributed")
CUT = Task(1, "balanced stages", BY_HAND)
CLOCK = Task(2, "how long a schedule takes", BY_HAND)
GPIPE = Task(3, "GPipe", BY_HAND)
ONE = Task(4, "1F1B", BY_HAND)
RUN = Task(5, "carrying it out", BY_HAND)
CROSSED = "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"  # the first rank waits for 1B0, the second for 0F1
TURNED = "0F0 0B0\n1B0 1F0"
# takes 3 F and 4 B, where others take as many of both
TWO_ORDERS = "0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1"
# the first rank is done, and the second waits for an F1 that nobody does
MISSING = "0F0 0B0\n1F0 1B0 1F1 1B1"
# in 3 stages: the smallest sum of squares has a stage of 21, the best cut none above 18
SQUARES = (3, 18, 9, 2, 3, 3)


def cuts(*cases: tuple[int, int]) -> Draw:
    """Draw the costs of so many layers, for so many stages."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                ({"costs": rng.integers(1, 20, n).astype(float), "stages": np.array(p)},),
                f"{n} layers, {p} stages",
            )
            for n, p in cases
        ]

    return draw


def uneven(rng: np.random.Generator) -> list[Case]:
    """Scale costs of which the smallest sum of squares is not the best cut."""
    return [
        Case(
            ({"costs": int(rng.integers(1, 9)) * np.array(SQUARES, float), "stages": np.array(3)},),
            "uneven",
        )
    ]


def named(name: str, ranks: int, microbatches: int) -> tuple[str, str]:
    """Return a schedule of the package as text, or a variant of GPipe; and its label.

    Reversed, its backwards go from the last to the first, as in its paper; turned, rank r begins
    with microbatch r.
    """
    rows = [line.split() for line in plan(name.split()[0], ranks, microbatches).text().splitlines()]
    if "reversed" in name:
        rows = [row[:microbatches] + row[microbatches:][::-1] for row in rows]
    if "turned" in name:
        halves = [
            (row[:microbatches], row[microbatches:], rank % microbatches)
            for rank, row in enumerate(rows)
        ]
        rows = [[*fs[at:], *fs[:at], *bs[at:], *bs[:at]] for fs, bs, at in halves]
    several = (
        f"{ranks} rank{'s' * (ranks > 1)}",
        f"{microbatches} microbatch{'es' * (microbatches > 1)}",
    )
    return "\n".join(map(" ".join, rows)), ", ".join((name, *several))


def clocks(*schedules: tuple[str, str]) -> Draw:
    """Ask how long each of these schedules, given as text with a label, takes."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(({"schedule": packed(text), "costs": rng.uniform(0.5, 3, 2)},), label)
            for text, label in schedules
        ]

    return draw


def sizes(*cases: tuple[int, int]) -> Draw:
    """Ask for the schedule of (ranks, microbatches)."""
    return lambda rng: [
        Case(({"sizes": np.array(each)},), "{} ranks, {} microbatches".format(*each))
        for each in cases
    ]


def models(*schedules: tuple[str, int, int]) -> Draw:
    """Draw weights and data for (schedule, ranks, microbatches); what a rank has no use for is
    NaN.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        found = []
        for name, ranks, microbatches in schedules:
            text, label = named(name, ranks, microbatches)
            inputs, targets = rng.normal(size=(2, microbatches, ROWS, WIDTH))
            given = [
                {
                    "inputs": inputs if rank == 0 else np.full_like(inputs, np.nan),
                    "targets": targets if rank == ranks - 1 else np.full_like(targets, np.nan),
                    "weights": rng.normal(size=(LAYERS, WIDTH, WIDTH)),
                    "words": packed(text.splitlines()[rank]),
                }
                for rank in range(ranks)
            ]
            found.append(Case(tuple(given), label))
        return found

    return draw


# ---------------------------------------------------------------- the checks


CHECKS = [
    Check(
        CUT,
        "the most expensive stage is the cheapest possible",
        6,
        cuts((8, 3), (12, 4)),
        cut,
        judge_cut,
    ),
    Check(CUT, "not the smallest sum of squares", 2, uneven, cut, judge_cut),
    Check(CUT, "one stage, and as many as layers", 3, cuts((5, 1), (5, 5)), cut, judge_cut),
    Check(
        CLOCK, "GPipe", 6, clocks(named("gpipe", 2, 1), named("gpipe", 3, 4)), clock, judge_clock
    ),
    Check(CLOCK, "1F1B", 4, clocks(named("1f1b", 4, 6)), clock, judge_clock),
    Check(
        CLOCK,
        "stuck",
        4,
        clocks((CROSSED, "a cycle of two"), (TURNED, "B before F")),
        clock,
        judge_clock,
    ),
    Check(
        CLOCK,
        "stuck behind a rank that is done",
        2,
        clocks((MISSING, "no F1 on rank 0")),
        clock,
        judge_clock,
    ),
    Check(GPIPE, "forwards, then backwards", 6, sizes((2, 4), (4, 6)), all_gpipe, judge_gpipe),
    Check(ONE, "bubble and memory", 12, sizes((2, 4), (4, 8)), all_1f1b, judge_1f1b),
    Check(ONE, "fewer microbatches than ranks", 4, sizes((4, 2)), all_1f1b, judge_1f1b),
    Check(
        RUN,
        "gradients, order, memory, messages",
        10,
        models(("gpipe", 2, 3), ("1f1b", 3, 5)),
        run,
        judge_run,
    ),
    Check(
        RUN, "each rank in an order of its own", 4, models(("gpipe turned", 2, 3)), run, judge_run
    ),
    Check(RUN, "what is done is let go", 4, models(("1f1b", 2, 8)), run, judge_run),
    Check(RUN, "one rank alone", 2, models(("1f1b", 1, 2)), run, judge_run),
    Check(RUN, "the same under mpirun", 3, models(("1f1b", 2, 3)), run, judge_run, wire="mpi"),
]

# ---- hidden: other cases of the checks above ----


def drawn_sizes(cases: int) -> Draw:
    """Draw rank counts and numbers of microbatches."""
    return lambda rng: sizes(
        *((int(rng.integers(3, 8)), int(rng.integers(1, 13))) for _ in range(cases))
    )(rng)


def drawn_cuts(rng: np.random.Generator) -> Sequence[Case]:
    """Draw layers and stages: few, and so many that not all cuts can be tried."""
    few = int(rng.integers(8, 16))
    return cuts(
        (few, int(rng.integers(3, few))), (int(rng.integers(40, 60)), int(rng.integers(8, 12)))
    )(rng)


def drawn_clocks(rng: np.random.Generator) -> Sequence[Case]:
    """Draw schedules; one in which each rank's warm-up is another, by chance, though never shorter
    than the next's.
    """
    p, m = int(rng.integers(3, 6)), int(rng.integers(6, 9))
    rows = []
    for rank, ahead in enumerate(sorted(rng.integers(1, m, p), reverse=True)):
        late = m - ahead  # forwards behind the warm-up, each with a backward in front of it
        words = [f"F{k}" for k in range(ahead)] + [
            f"{kind}{k + shift}" for k in range(late) for kind, shift in (("B", 0), ("F", ahead))
        ]
        rows.append(" ".join(f"{rank}{word}" for word in words + [f"B{k}" for k in range(late, m)]))
    mixed = "\n".join(rows), f"each rank with another warm-up, {p} ranks, {m} microbatches"
    return clocks(
        named("1f1b", p, m), named("naive", p, m), mixed, (TWO_ORDERS, "backwards in two orders")
    )(rng)


OTHERS = models(("gpipe reversed", 3, 4), ("1f1b", 4, 6), ("naive", 2, 3), ("gpipe turned", 3, 4))
CHECKS += [
    Check(CUT, "more layers", 5, drawn_cuts, cut, judge_cut, hidden=True),
    Check(CLOCK, "other schedules", 4, drawn_clocks, clock, judge_clock, hidden=True),
    Check(GPIPE, "other sizes", 3, drawn_sizes(1), all_gpipe, judge_gpipe, hidden=True),
    Check(ONE, "other sizes", 8, drawn_sizes(2), all_1f1b, judge_1f1b, hidden=True),
    Check(RUN, "other schedules", 8, OTHERS, run, judge_run, hidden=True),
]
