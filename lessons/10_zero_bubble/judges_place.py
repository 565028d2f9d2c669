"""Lesson 10, task 1: the program that runs beside an answer, and its judge."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    known,
)


def place(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1 for every rank."""
    ranks, microbatches, chunks = given["sizes"].tolist()
    for rank in range(ranks):
        found = list(exercise.stages_of(rank, ranks, chunks))
        if len(found) != chunks:
            why = known(other_stages(rank, ranks, chunks), partial(operator.eq, found))
            raise Wrong(
                f"rank {rank} of {ranks} has stages {found}, {len(found)} of them, expected "
                f"{chunks}{why}"
            )
    return {
        "stages": [exercise.stages_of(rank, ranks, chunks) for rank in range(ranks)],
        "warm-up": [exercise.warm_up(rank, ranks, microbatches, chunks) for rank in range(ranks)],
    }


def judge_place(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The formulas of the lesson."""
    p, m, v = case.given[0]["sizes"].tolist()
    warm_ups = results[0]["warm-up"].tolist()
    likely = [story for story, values in other_warm_ups(p, m, v).items() if values == warm_ups]
    likely = [
        story
        for story in likely
        if story.split(",")[0] == story or story.split(",")[0] not in likely
    ][:3]
    for rank in range(p):
        stages, forwards = results[0]["stages"][rank].tolist(), warm_ups[rank]
        if stages != [chunk * p + rank for chunk in range(v)]:
            why = known(other_stages(rank, p, v), partial(operator.eq, stages))
            raise Wrong(
                f"rank {rank} of {p} has stages {stages}, expected "
                f"{[c * p + rank for c in range(v)]}{why}"
            )
        ahead, back = (v - 1) * p, p - rank - 1
        expected = min(ahead + 2 * back, m * v)
        instead = {
            f"more than the {m * v} that it has": ahead + 2 * back
            if ahead + 2 * back > m * v
            else -1,
            "the last of these is the forward of the first turn": expected + 1,
            "the way of the gradient back to this rank is not counted": min(ahead + back, m * v),
            f"the rank has {v} times {m} forwards, not {m}": min(ahead + 2 * back, m),
        }
        if forwards != expected:
            hint = next((f": {story}" for story, value in instead.items() if forwards == value), "")
            hint = (
                f": that is {', or '.join(likely)}, where it is (v - 1) p + 2 (p - r - 1)"
                if likely
                else hint
            )
            raise Wrong(
                f"rank {rank} of {p} warms up with {forwards} forwards, expected {expected}{hint}"
            )


def other_stages(rank: int, ranks: int, chunks: int) -> dict[str, list[int]]:
    """Return the stages that a rank gets by mistake."""
    right = [chunk * ranks + rank for chunk in range(chunks)]
    return {
        "stages are counted from 1": [stage + 1 for stage in right],
        "they come from the last to the first": right[::-1],
        "ranks get them to and fro, and not from the first rank again": (
            [chunk * ranks + (ranks - 1 - rank if chunk % 2 else rank) for chunk in range(chunks)]
        ),
        "each rank gets neighbouring stages": list(range(rank * chunks, (rank + 1) * chunks)),
        "they lie `chunks` apart, and not `ranks`": list(range(rank, ranks * chunks, chunks)),
        "they lie `chunks` apart, and `chunks` of them are taken": [
            rank + chunk * chunks for chunk in range(chunks)
        ],
        "there is one chunk more": [*right, chunks * ranks + rank],
        "there is one chunk less": right[:-1],
        "ranks are counted from the last one": [
            chunk * ranks + ranks - 1 - rank for chunk in range(chunks)
        ],
        "as many stages as ranks are taken": [rank + stage * ranks for stage in range(ranks)],
    }


def other_warm_ups(p: int, m: int, v: int) -> dict[str, list[int]]:
    """Return all ranks' warm-ups by the formula, all but the right one: forwards of the other
    chunks, and the way.
    """
    chunks = {
        "(v - 1) p": (v - 1) * p,
        "v p": v * p,
        "v - 1": v - 1,
        "v": v,
        "(v - 1) m": (v - 1) * m,
        "v m": v * m,
    }
    chunks |= {"no": 0, "p": p, "(v - 2) p": (v - 2) * p, "2 (v - 1) p": 2 * (v - 1) * p}
    ways = {
        "2 (p - r - 1)": [2 * (p - r - 1) for r in range(p)],
        "p - r - 1": [p - r - 1 for r in range(p)],
        "2 (p - r)": [2 * (p - r) for r in range(p)],
        "p - r": [p - r for r in range(p)],
        "2 r": [2 * r for r in range(p)],
        "r": list(range(p)),
        "2 (p - r) - 1": [2 * (p - r) - 1 for r in range(p)],
        "no": [0] * p,
    }
    found = {}
    for ahead, some in chunks.items():
        for back, way in ways.items():
            for most, cap in (("", m * v), (", at most m", m), (", without a limit", 10**9)):
                story = f"{ahead} + {back}{most}"
                if (ahead, back, most) != ("(v - 1) p", "2 (p - r - 1)", ""):
                    found[story] = [min(some + one, cap) for one in way]
    return found
