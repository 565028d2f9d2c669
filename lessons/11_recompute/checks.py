"""Lesson 11: what is checked, and for how many points.

The parts here remember the storage of all they compute, weakly: what is still alive after forward,
somebody holds.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from judges import judge_chain, run_chain
from judges_between import judge_between, run_between
from judges_plan import follow, judge_account, judge_plan, plan_of, run_account, run_plan

from minidist.course.grader.contract import MEMORY, Case, Check, Draw, Task

BY_HAND = (*MEMORY, "minidist.plan", "torch.utils.checkpoint")
ACCOUNT = Task(1, "the account of a plan", BY_HAND)
CHECKPOINT = Task(2, "a checkpoint", BY_HAND)
RANDOM = Task(3, "the same random numbers", BY_HAND)
PLAN = Task(4, "the fastest plan in a budget")
BETWEEN = Task(5, "no message twice", BY_HAND)


# ---------------------------------------------------------------- cases


def chains(*sizes: tuple[int, int]) -> Draw:
    """Draw (ranks, blocks): pairs of matrices [blocks, 2, 24, 6] for all, and rows [5, 6] for each
    rank.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for ranks, blocks in sizes:
            weights, seed = rng.normal(size=(blocks, 2, 24, 6)) / 2, rng.integers(1 << 30)
            given = [
                {"weights": weights, "x": rng.normal(size=(5, 6)), "seed": seed + rank}
                for rank in range(ranks)
            ]
            cases.append(Case(tuple(given), f"{ranks} rank{'s' * (ranks > 1)}, depth {blocks}"))
        return cases

    return draw


# bytes of a block's input, and of what it saves: other lengths than the root
SIZES = ((40, 1), (10, 3), (3, 2))


def layers(*counts: int) -> Draw:
    """Draw bytes and seconds of blocks, plans (0 is stored, equal neighbours are a segment), sizes
    and budgets.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for count in counts:
            inputs, marks = rng.integers(1, 5, count), rng.integers(0, 3, (6, count))
            # all stored, one segment, each for itself
            marks[0], marks[1], marks[2] = 0, 1, np.arange(1, count + 1)
            given = {"inputs": inputs, "saved": inputs + rng.integers(2, 20, count), "marks": marks}
            given |= {
                "seconds": rng.integers(1, 9, count),
                "sizes": np.array([[4, 4], [1, 40], rng.integers(1, 9, 2), *SIZES]),
            }
            most, least = (follow(plan_of(mark), given)[0] for mark in (marks[0], marks[2]))
            given["budgets"] = np.array(
                [most, (most + least) // 2, least, given["saved"].max() - 1]
            )
            cases.append(Case((given,), f"{count} blocks"))
        return cases

    return draw


# ---------------------------------------------------------------- the checks


def chain(
    task: Task,
    title: str,
    points: float,
    draw: Draw,
    wire: str = "threads",
    hidden: bool = False,
    **how: bool,
) -> Check:
    """Check task 2 or 3."""
    how["random"] = task is RANDOM
    return Check(
        task,
        title,
        points,
        draw,
        partial(run_chain, **how),
        partial(judge_chain, **how),
        hidden,
        wire,
    )


# under mpirun an all-reduce goes through shared memory
UNCOUNTED = partial(judge_between, counted=False)
CHECKS = [
    Check(
        ACCOUNT,
        "plans, and the best length of segments",
        12,
        layers(4, 7, 12),
        run_account,
        judge_account,
    ),
    chain(CHECKPOINT, "one block", 8, chains((1, 1))),
    chain(CHECKPOINT, "several blocks, on several ranks", 6, chains((2, 3))),
    chain(CHECKPOINT, "the first block: x needs no gradient", 5, chains((1, 2)), needs=False),
    chain(CHECKPOINT, "a frozen parameter", 4, chains((1, 2)), frozen=True),
    chain(CHECKPOINT, "the same under mpirun", 3, chains((2, 3)), "mpi"),
    chain(RANDOM, "one block with dropout", 6, chains((1, 1))),
    chain(RANDOM, "several that share a generator", 6, chains((2, 3))),
    chain(RANDOM, "the same under mpirun", 3, chains((2, 2)), "mpi"),
    Check(PLAN, "a few blocks", 10, layers(3, 6), run_plan, judge_plan),
    Check(PLAN, "many blocks", 4, layers(24), run_plan, judge_plan),
    Check(BETWEEN, "one tensor-parallel region", 5, chains((2, 1)), run_between, judge_between),
    Check(BETWEEN, "several", 5, chains((3, 3)), run_between, judge_between),
    Check(BETWEEN, "the same under mpirun", 3, chains((2, 2)), run_between, UNCOUNTED, wire="mpi"),
]

# ---- hidden: other cases of the checks above ----


CHECKS += [
    Check(ACCOUNT, "other sizes", 4, layers(9, 26), run_account, judge_account, hidden=True),
    chain(CHECKPOINT, "other sizes", 4, chains((3, 2), (1, 5)), hidden=True),
    chain(RANDOM, "other sizes", 3, chains((1, 2), (3, 4)), hidden=True),
    Check(PLAN, "other sizes", 6, layers(9, 17), run_plan, judge_plan, hidden=True),
    Check(BETWEEN, "other sizes", 3, chains((4, 2)), run_between, judge_between, hidden=True),
]
