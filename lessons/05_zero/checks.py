"""Lesson 05: what is checked, and for how many points. In float64, ranks differ from a serial run
by rounding only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from judges import SIZES, sharded
from judges_clip import clipped, judge_clipped
from judges_equation import RECIPES, equation, judge_equation
from judges_sharded import judge_sharded

from minidist.course.grader import contract
from minidist.course.grader.contract import MEMORY, STRATEGIES, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, *MEMORY, "minidist.plan", "torch.distributed.optim")
EQUATION = Task(1, "the memory equation", BY_HAND)
STATE = Task(2, "ZeRO-1", BY_HAND, imports=contract.BY_OPTIMIZERS)
GRADIENTS = Task(3, "ZeRO-2", BY_HAND, imports=contract.BY_OPTIMIZERS)
CLIP = Task(4, "clipping", BY_HAND)


def batches(
    *ranks: int,
    stage: int,
    steps: int = 3,
    backwards: int = 1,
    counted: bool = True,
    there: float = 0.0,
) -> Draw:
    """Draw one case for each number of ranks: parameters, and a batch for each backward of each
    step.

    Before each backward the slices have gradients that are `there`, if it is not 0.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for many in ranks:
            given: dict[str, Any] = {"stage": stage, "counted": counted, "there": there}
            given["parameters"] = rng.normal(size=sum(SIZES))
            given |= {
                name: rng.normal(size=(steps, backwards, 7, n))
                for name, n in (("inputs", 3), ("targets", 2))
            }
            arrays = {name: np.asarray(value) for name, value in given.items()}
            cases.append(
                Case(
                    (arrays,) * many,
                    f"ranks {many}" + (f", backwards {backwards}" * (backwards > 1)),
                )
            )
        return cases

    return draw


def questions(*asked: tuple[float, float, int, int, str]) -> Draw:
    """Ask about (parameters, memory, ranks, stage, recipe), as given, and with other sizes of model
    and memory.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        rows = []
        for size, memory, ranks, stage, recipe in asked:
            for one, other in ((1.0, 1.0), (1 + 0.1 * rng.random(), 1 - 0.1 * rng.random())):
                rows.append(
                    [int(one * size), int(other * memory), ranks, stage, RECIPES.index(recipe)]
                )
        return [Case(({"questions": np.array(rows)},), f"{len(rows)} questions")]

    return draw


def slices(*ranks: int, limit: float, broken: str = "", empty: str = "") -> Draw:
    """Draw gradients of three slices, of other lengths on each rank.

    `broken` is an element that is put in ("inf", "nan"): on the last rank, or in "all inf" on all.
    `empty` says whose slices are all empty: the "last" rank's, or those of "all".
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for many in ranks:
            given = []
            for rank in range(many):
                none = empty == "all" or (empty == "last" and rank == many - 1)
                lengths = np.array([2 * (rank % 2), rng.integers(2, 5), 1]) * (not none)
                gradient = rng.normal(size=lengths.sum()) * (1 + rank)
                if broken and (rank == many - 1 or broken.startswith("all")):
                    gradient[-1] = float(broken.split()[-1])
                given.append({"gradient": gradient, "lengths": lengths, "limit": np.array(limit)})
            cases.append(
                Case(
                    tuple(given),
                    "ranks "
                    f"{many}{', broken: ' * bool(broken)}{broken}{', empty: ' * bool(empty)}{empty}",
                )
            )
        return cases

    return draw


ASKED = (
    (7.5e9, 80e9, 64, 0, "mixed"),
    (7.5e9, 80e9, 64, 1, "mixed"),
    (7.5e9, 32e9, 64, 2, "float32"),
    (30e9, 80e9, 8, 1, "mixed"),
    (7.5e9, 24e9, 16, 3, "8-bit moments"),
    (5e9, 30e9, 3, 1, "8-bit moments"),
    (1e9, 16e9, 1, 0, "float32"),
)
CHECKS = [
    Check(EQUATION, "what fits", 10, questions(*ASKED), equation, judge_equation),
    Check(STATE, "trains as one rank would", 13, batches(2, 4, stage=1), sharded, judge_sharded),
    Check(
        STATE,
        "sets gradients, and adds nothing",
        3,
        batches(3, stage=1, there=7.0),
        sharded,
        judge_sharded,
    ),
    Check(STATE, "slices of unequal length", 10, batches(3, stage=1), sharded, judge_sharded),
    Check(
        STATE,
        "the same under mpirun",
        3,
        batches(2, stage=1, counted=False),
        sharded,
        judge_sharded,
        wire="mpi",
    ),
    Check(
        GRADIENTS, "trains as one rank would", 14, batches(2, 3, stage=2), sharded, judge_sharded
    ),
    Check(
        GRADIENTS,
        "adds up several backwards",
        8,
        batches(2, stage=2, backwards=2),
        sharded,
        judge_sharded,
    ),
    Check(
        GRADIENTS,
        "under mpirun",
        3,
        batches(2, stage=2, counted=False),
        sharded,
        judge_sharded,
        wire="mpi",
    ),
    Check(CLIP, "scales what is too long", 8, slices(2, 3, limit=0.5), clipped, judge_clipped),
    Check(CLIP, "leaves the rest alone", 2, slices(3, limit=1e6), clipped, judge_clipped),
    Check(
        CLIP,
        "infinite on every rank",
        1,
        slices(2, limit=1.0, broken="all inf"),
        clipped,
        judge_clipped,
    ),
    Check(
        CLIP, "infinite on one rank", 1, slices(2, limit=1.0, broken="inf"), clipped, judge_clipped
    ),
    Check(CLIP, "not a number", 1, slices(3, limit=1.0, broken="nan"), clipped, judge_clipped),
    Check(
        CLIP,
        "nothing but empty slices",
        1,
        slices(2, limit=1.0, empty="all"),
        clipped,
        judge_clipped,
    ),
    Check(
        CLIP, "the same under mpirun", 2, slices(2, limit=0.5), clipped, judge_clipped, wire="mpi"
    ),
]

# ---- hidden: other cases of the checks above ----

LARGE = (
    (175e9, 80e9, 384, 3, "mixed"),
    (13e9, 60e9, 7, 2, "mixed"),
    (9e9, 80e9, 5, 1, "float32"),
    (20e9, 80e9, 6, 2, "8-bit moments"),
    (8e9, 80e9, 9, 0, "8-bit moments"),
)
CHECKS += [
    Check(EQUATION, "other models", 5, questions(*LARGE), equation, judge_equation, hidden=True),
    Check(
        STATE,
        "ranks without a slice of a bias",
        6,
        batches(6, stage=1, steps=2),
        sharded,
        judge_sharded,
        hidden=True,
    ),
    Check(
        GRADIENTS,
        "other sizes",
        5,
        batches(5, stage=2, steps=2, backwards=3),
        sharded,
        judge_sharded,
        hidden=True,
    ),
    Check(CLIP, "other slices", 3, slices(5, limit=2.5), clipped, judge_clipped, hidden=True),
    Check(
        CLIP,
        "one rank without",
        1,
        slices(3, limit=0.5, empty="last"),
        clipped,
        judge_clipped,
        hidden=True,
    ),
]
