"""Lesson 06: what is checked, and for how many points.

The expected values are those of one rank that has everything, computed with torch in the grader's
process. Memory is that of the storages that the parameters have ever had and that are still alive,
whoever keeps them.
"""

from __future__ import annotations

import numpy as np
from judges import come_and_go, cutting, judge_cut, judge_unit, judge_unit_values
from judges_training import judge_training, judge_values, training

from minidist.course.grader.contract import STRATEGIES, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, "torch.distributed")
CUT = Task(1, "parameters into shards", BY_HAND)
UNIT = Task(2, "a unit comes and goes", BY_HAND)
MODEL = Task(3, "forward and backward", BY_HAND)
HYBRID = Task(4, "hybrid sharding", BY_HAND, may_use=("comm.split",))


def shapes(*sizes: tuple[int, tuple[tuple[int, ...], ...]]) -> Draw:
    """Draw parameters of these shapes for each (ranks, shapes)."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for ranks, each in sizes:
            given = {
                f"parameter {number}": rng.normal(size=shape) for number, shape in enumerate(each)
            }
            label = (
                f"{ranks} {'rank' if ranks == 1 else 'ranks'}, shapes {', '.join(map(str, each))}"
            )
            cases.append(Case((given,) * ranks, label))
        return cases

    return draw


def blocks(*sizes: tuple[int, int, int], groups_of: int = 0) -> Draw:
    """Draw a model for each (ranks, units, D), the same on all ranks, and inputs, which differ."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for ranks, units, width in sizes:
            hidden, weights = width + 1, {}
            for unit in range(units):
                for part, shape in enumerate(((hidden, width), (hidden,), (width, hidden))):
                    weights[f"{unit}.{part}"] = rng.normal(size=shape) / width
            given = [{**weights, "sizes": np.array([units, groups_of])} for _ in range(ranks)]
            for each in given:
                each["x"], each["gradient"] = (
                    rng.normal(size=(2, 3, width)),
                    rng.normal(size=(2, 3, width)),
                )
            groups = f" in groups of {groups_of}" if groups_of else ""
            cases.append(Case(tuple(given), f"{ranks} ranks{groups}, units: {units}, of D={width}"))
        return cases

    return draw


SMALL = ((2, 3), (2,), (3, 2))
CHECKS = [
    Check(
        CUT, "cuts, and knows what it holds", 8, shapes((2, SMALL), (4, SMALL)), cutting, judge_cut
    ),
    Check(CUT, "fewer elements than ranks", 3, shapes((4, ((1,), (2, 1)))), cutting, judge_cut),
    Check(CUT, "the same under mpirun", 3, shapes((2, SMALL)), cutting, judge_cut, wire="mpi"),
    Check(
        UNIT, "whole, then nothing again", 12, blocks((2, 1, 3), (3, 1, 3)), come_and_go, judge_unit
    ),
    Check(UNIT, "one rank alone", 3, blocks((1, 1, 3)), come_and_go, judge_unit),
    Check(
        UNIT,
        "the same under mpirun",
        3,
        blocks((2, 1, 3)),
        come_and_go,
        judge_unit_values,
        wire="mpi",
    ),
    Check(
        MODEL,
        "the serial numbers, from parts",
        14,
        blocks((2, 4, 3), (3, 3, 4)),
        training,
        judge_training,
    ),
    Check(MODEL, "one unit only", 4, blocks((2, 1, 3)), training, judge_training),
    Check(MODEL, "the same under mpirun", 3, blocks((2, 3, 3)), training, judge_values, wire="mpi"),
    Check(
        HYBRID, "two groups of two", 16, blocks((4, 3, 3), groups_of=2), training, judge_training
    ),
    Check(HYBRID, "one group", 3, blocks((2, 2, 3), groups_of=2), training, judge_training),
    Check(
        HYBRID,
        "under mpirun",
        3,
        blocks((2, 2, 3), groups_of=1),
        training,
        judge_values,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----


CHECKS += [
    Check(
        CUT,
        "other shapes and rank counts",
        6,
        shapes((5, ((3, 2, 2), (4,))), (1, SMALL)),
        cutting,
        judge_cut,
        hidden=True,
    ),
    Check(UNIT, "another size", 4, blocks((4, 1, 5)), come_and_go, judge_unit, hidden=True),
    Check(MODEL, "another size", 7, blocks((3, 4, 5)), training, judge_training, hidden=True),
    Check(
        HYBRID,
        "two groups of three",
        4,
        blocks((6, 3, 2), groups_of=3),
        training,
        judge_training,
        hidden=True,
    ),
    Check(
        HYBRID,
        "two groups of one",
        4,
        blocks((2, 4, 4), groups_of=1),
        training,
        judge_training,
        hidden=True,
    ),
]
