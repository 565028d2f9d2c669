"""Lesson 04: what is checked, and for how many points. In float64, ranks differ from a serial run
by rounding only.
"""

from __future__ import annotations

import numpy as np
from judges import SIZES, judge_naive, judge_part, naive, part
from judges_accumulated import accumulated, judge_accumulated
from judges_buckets import assign, bucketed, judge_assign, judge_bucketed

from minidist.course.grader.contract import STRATEGIES, TRAINER, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, *TRAINER, "torch.nn.parallel")
TITLES = ("a part of the loss", "naive data parallelism", "buckets", "accumulation")
PART, NAIVE, BUCKETS, ACCUMULATE = (
    Task(number, title, BY_HAND) for number, title in enumerate(TITLES, start=1)
)
OPTIONS = {
    "steps": 2,
    "unequal": 0,  # ranks begin with other parameters
    "limit": 80,
    "microbatches": 1,
    "reordered": 0,  # ranks run the model's layers in another order
    "quiet": 0,  # before each backward there is one that does not synchronise
    "failing": 0,  # the model raises in its second call
    "idle": 0,  # all inputs are 0, and so are some gradients
    "single": 0,  # the model is of float32
}


def batches(*shapes: tuple[int, int], **options: int) -> Draw:
    """Draw one case for each (ranks, rows): a batch for each step, and parameters, equal on all
    ranks or not.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases, chosen = [], OPTIONS | options
        for ranks, rows in shapes:
            arrays = {name: np.array(value) for name, value in chosen.items()}
            arrays |= {
                name: rng.normal(size=(chosen["steps"], rows, n))
                for name, n in (("inputs", 3), ("targets", 2))
            }
            arrays["inputs"] *= 1 - chosen["idle"]
            own = rng.normal(size=(ranks, sum(SIZES)))
            given = tuple(
                arrays | {"parameters": own[rank * chosen["unequal"]]} for rank in range(ranks)
            )
            if chosen["single"]:
                given = tuple(
                    {k: v.astype(np.float32) if v.dtype == float else v for k, v in one.items()}
                    for one in given
                )
            said = "".join(f", {name} {value}" for name, value in options.items())
            cases.append(Case(given, f"ranks {ranks}, rows {rows}{said}"))
        return cases

    return draw


def limits(*bytes: int) -> Draw:
    """Draw one case for each limit of a bucket."""
    return lambda rng: [case for limit in bytes for case in batches((1, 1), limit=limit)(rng)]


CHECKS = [
    Check(PART, "parts add up", 8, batches((2, 6), (3, 7)), part, judge_part),
    Check(PART, "fewer rows than ranks", 3, batches((4, 2)), part, judge_part),
    Check(PART, "the same under mpirun", 2, batches((2, 5)), part, judge_part, wire="mpi"),
    Check(
        NAIVE, "trains as one rank would", 8, batches((2, 6), (3, 7), unequal=1), naive, judge_naive
    ),
    Check(NAIVE, "gradients of 0", 3, batches((2, 6), unequal=1, idle=1), naive, judge_naive),
    Check(
        NAIVE,
        "the same under mpirun",
        3,
        batches((2, 5), unequal=1),
        naive,
        judge_naive,
        wire="mpi",
    ),
    Check(BUCKETS, "deals parameters out", 5, limits(80, 96), assign, judge_assign),
    Check(BUCKETS, "one for each, one for all", 3, limits(1, 9999), assign, judge_assign),
    Check(
        BUCKETS, "launches complete buckets", 9, batches((2, 6), (3, 7)), bucketed, judge_bucketed
    ),
    Check(
        BUCKETS,
        "a model of float32",
        3,
        batches((2, 6), single=1, limit=40),
        bucketed,
        judge_bucketed,
    ),
    Check(
        BUCKETS,
        "ranks of different orders",
        6,
        batches((2, 6), reordered=1),
        bucketed,
        judge_bucketed,
    ),
    Check(BUCKETS, "rests between", 4, batches((2, 6), quiet=1), bucketed, judge_bucketed),
    Check(
        BUCKETS, "the same under mpirun", 3, batches((2, 6)), bucketed, judge_bucketed, wire="mpi"
    ),
    Check(
        ACCUMULATE,
        "communicates once",
        9,
        batches((2, 9), (3, 7), microbatches=3),
        accumulated,
        judge_accumulated,
    ),
    Check(
        ACCUMULATE,
        "parts without rows",
        3,
        batches((2, 3), microbatches=3),
        accumulated,
        judge_accumulated,
    ),
    Check(
        ACCUMULATE,
        "an error",
        3,
        batches((2, 6), microbatches=3, failing=1),
        accumulated,
        judge_accumulated,
    ),
    Check(
        ACCUMULATE,
        "under mpirun",
        3,
        batches((2, 6), microbatches=2),
        accumulated,
        judge_accumulated,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(PART, "other sizes", 3, batches((4, 5), (5, 12)), part, judge_part, hidden=True),
    Check(
        NAIVE,
        "other sizes",
        5,
        batches((4, 9), (4, 3), unequal=1, steps=3),
        naive,
        judge_naive,
        hidden=True,
    ),
    Check(BUCKETS, "other limits", 3, limits(33, 130, 161), assign, judge_assign, hidden=True),
    Check(
        BUCKETS,
        "other sizes",
        4,
        batches((4, 3), steps=3, limit=1),
        bucketed,
        judge_bucketed,
        hidden=True,
    ),
    Check(
        BUCKETS,
        "all at once",
        3,
        batches((3, 5), reordered=1, quiet=1),
        bucketed,
        judge_bucketed,
        hidden=True,
    ),
    Check(
        ACCUMULATE,
        "other sizes",
        4,
        batches((3, 14), microbatches=4),
        accumulated,
        judge_accumulated,
        hidden=True,
    ),
]
