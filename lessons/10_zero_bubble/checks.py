"""Lesson 10: what is checked, and for how many points.

Schedules travel as text, are held against the package's checker and simulator in the grader's
process, and carried out on a small model by the package's executor; gradients are held against
autograd on the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from judges import (
    ROWS,
    WIDTH,
    all_interleaved,
    all_zb_h1,
    carried_out,
    judge_carried_out,
    judge_interleaved,
    judge_zb_h1,
    label_of,
    split,
)
from judges_place import judge_place, place
from judges_split import judge_split

from minidist.course.grader.contract import COLLECTIVES, STRATEGIES, Case, Check, Draw, Task

SCHEDULES = "minidist.full.pipeline.schedules"
PLACE = Task(1, "placement and warm-up", (SCHEDULES,))
CHUNKS = Task(2, "interleaved 1F1B", (SCHEDULES, *COLLECTIVES))
SPLIT = Task(
    3, "a backward in two halves", (*STRATEGIES, "torch.autograd.graph", "torch._functorch")
)
FILL = Task(4, "W fills the bubble", (SCHEDULES, *COLLECTIVES))


def sizes(*cases: tuple[int, int, int]) -> Draw:
    """Ask for (ranks, microbatches, chunks)."""
    return lambda rng: [Case(({"sizes": np.array(each)},), label_of(*each)) for each in cases]


def models(*cases: tuple[int, int, int]) -> Draw:
    """Draw data and the weights of all stages, on every rank, for (ranks, microbatches, chunks)."""

    def draw(rng: np.random.Generator) -> list[Case]:
        found = []
        for p, m, v in cases:
            data, weights = (
                rng.normal(size=(2, m, ROWS, WIDTH)),
                rng.normal(size=(p * v, WIDTH, WIDTH)),
            )
            given = {
                "sizes": np.array([p, m, v]),
                "inputs": data[0],
                "targets": data[1],
                "weights": weights,
            }
            found.append(Case((given,) * p, label_of(p, m, v)))
        return found

    return draw


def stages(*cases: tuple[int, int]) -> Draw:
    """Draw a stage of (rows, layers): weights of several shapes, activations, the gradient of the
    output.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        found = []
        for rows, layers in cases:
            widths = rng.integers(rows + 1, 12, layers + 1)
            given = {
                f"weight {k}": rng.normal(size=(widths[k + 1], widths[k])) / 3
                for k in range(layers)
            }
            given |= {
                "x": rng.normal(size=(rows, widths[0])),
                "gradient": rng.normal(size=(rows, widths[-1])),
            }
            found.append(Case((given,), f"{layers} layer{'s' * (layers > 1)}, {rows} rows"))
        return found

    return draw


# ---------------------------------------------------------------- the checks


RUN_CHUNKS, RUN_FILLED = carried_out(all_interleaved), carried_out(all_zb_h1)
CHECKS = [
    Check(PLACE, "stages and warm-up", 8, sizes((2, 4, 2), (4, 8, 3)), place, judge_place),
    Check(PLACE, "as many microbatches as ranks", 2, sizes((4, 4, 2)), place, judge_place),
    Check(
        CHUNKS,
        "bubble and memory",
        12,
        sizes((2, 4, 2), (3, 6, 2), (4, 8, 3)),
        all_interleaved,
        judge_interleaved,
    ),
    Check(CHUNKS, "gradients and messages", 6, models((3, 3, 2)), RUN_CHUNKS, judge_carried_out),
    Check(
        CHUNKS,
        "the same under mpirun",
        4,
        models((2, 4, 2)),
        RUN_CHUNKS,
        judge_carried_out,
        wire="mpi",
    ),
    Check(SPLIT, "one layer", 6, stages((3, 1)), split, judge_split),
    Check(SPLIT, "several layers", 10, stages((3, 2), (4, 3)), split, judge_split),
    Check(
        FILL,
        "bubble and memory",
        15,
        sizes((2, 4, 1), (3, 3, 1), (4, 8, 1)),
        all_zb_h1,
        judge_zb_h1,
    ),
    Check(FILL, "gradients and messages", 5, models((3, 5, 1)), RUN_FILLED, judge_carried_out),
    Check(
        FILL,
        "the same under mpirun",
        4,
        models((2, 3, 1)),
        RUN_FILLED,
        judge_carried_out,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----


def drawn_sizes(rng: np.random.Generator) -> Sequence[Case]:
    """Draw two sizes with several chunks."""
    ranks = rng.integers(2, 6, 2).tolist()
    return sizes(*((p, p * int(rng.integers(1, 4)), int(rng.integers(2, 5))) for p in ranks))(rng)


def drawn_single(rng: np.random.Generator) -> Sequence[Case]:
    """Draw two sizes with one stage a rank."""
    ranks = rng.integers(2, 8, 2).tolist()
    return sizes(*((p, p + int(rng.integers(0, 8)), 1) for p in ranks))(rng)


def drawn_stages(rng: np.random.Generator) -> Sequence[Case]:
    """Draw the numbers of rows and layers."""
    return stages((int(rng.integers(2, 6)), int(rng.integers(2, 5))))(rng)


CHECKS += [
    Check(PLACE, "other sizes", 4, drawn_sizes, place, judge_place, hidden=True),
    Check(CHUNKS, "other sizes", 8, drawn_sizes, all_interleaved, judge_interleaved, hidden=True),
    Check(SPLIT, "other shapes", 6, drawn_stages, split, judge_split, hidden=True),
    Check(FILL, "other sizes", 7, drawn_single, all_zb_h1, judge_zb_h1, hidden=True),
    Check(
        FILL,
        "more ranks on a model",
        3,
        models((4, 6, 1)),
        RUN_FILLED,
        judge_carried_out,
        hidden=True,
    ),
]
