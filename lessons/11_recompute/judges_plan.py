"""Lesson 11, tasks 1 and 4: the programs that ask for plans and their peaks, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong


def run_account(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    sizes = [given[name].tolist() for name in ("inputs", "saved", "seconds")]
    return {
        "found": [exercise.account(plan_of(marks), *sizes) for marks in given["marks"].tolist()],
        "lengths": [exercise.best_length(len(sizes[0]), *pair) for pair in given["sizes"].tolist()],
    }


def run_plan(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 with every budget; of each plan return rows (block, part, recomputed?), or nothing if refused."""
    found = {}
    for number, budget in enumerate(given["budgets"].tolist()):
        try:
            plan = exercise.fastest_plan(*(given[name].tolist() for name in ("inputs", "saved", "seconds")), budget)
        except ValueError:
            plan = ()
        rows = [(part, i, 0) if isinstance(part, int) else (list(part), i, 1) for i, part in enumerate(plan)]
        found[str(number)] = [(b, i, mark) for part, i, mark in rows for b in (part if mark else [part])]
    return found


def judge_account(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Follow each plan, and try every length."""
    given = case.given[0]
    for marks, found in zip(given["marks"].tolist(), results[0]["found"].tolist(), strict=True):
        expected = follow(plan_of(marks), given)
        if tuple(found) != expected:
            asked, given_lists = plan_of(marks), {name: given[name].tolist() for name in ("inputs", "saved", "seconds")}
            says = f"account of {asked} is {tuple(found)} (bytes, seconds), expected {expected}, with {given_lists}"
            for clause, peak in wrong_peaks(asked, given).items():
                if found[0] == peak:
                    raise Wrong(f"{says}: this is what comes out if {clause}")
            raise Wrong(says)
    count = len(given["inputs"])
    for (kept, saved), length in zip(given["sizes"].tolist(), results[0]["lengths"].tolist(), strict=True):
        peaks = [k * saved + -(-count // k) * kept for k in range(1, count + 1)]
        if length != (expected := peaks.index(min(peaks)) + 1):
            floor = [k * saved + count // k * kept for k in range(1, count + 1)]
            why = ": of several the smallest k" if 0 < length <= count and peaks[int(length) - 1] == min(peaks) else ""
            if not why and length == floor.index(min(floor)) + 1:
                why = ": layers/k is to be rounded up, a last shorter segment has an input, too"
            raise Wrong(f"best_length({count}, {kept}, {saved}) is {length}, expected {expected}{why}")


def judge_plan(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each plan fits, and recomputes no more than the best of all."""
    given = case.given[0]
    for number, budget in enumerate(given["budgets"].tolist()):
        rows, best = results[0][str(number)].reshape(-1, 3), least_seconds(given, budget)
        if not len(rows) and best is not None:
            raise Wrong(f"budget {budget} is refused, but there is a plan that fits")
        if not len(rows):
            continue
        if rows[:, 0].tolist() != list(range(len(given["saved"]))):
            raise Wrong(f"budget {budget}: blocks {rows[:, 0].tolist()} are planned, expected each once, in order")
        peak, seconds = follow(plan_of((rows[:, 1] + 1) * rows[:, 2]), given)
        if peak > budget or seconds != best:
            wanted = "a ValueError" if best is None else f"{best} seconds"
            why = "which is more" if peak > budget else "which fits, but recomputes more than it has to"
            says = f"budget {budget}: the plan {plan_of((rows[:, 1] + 1) * rows[:, 2])} takes {peak} bytes, {why}: "
            raise Wrong(says + f"{seconds} seconds again, expected {wanted}")


def plan_of(marks: Sequence[int]) -> list[int | tuple[int, ...]]:
    """Return a plan from its marks: 0 is stored, equal neighbours are a segment."""
    groups = [(mark, [block for block, _ in run]) for mark, run in groupby(enumerate(marks), key=lambda pair: pair[1])]
    return [part for mark, blocks in groups for part in ([tuple(blocks)] if mark else blocks)]


def follow(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> tuple[int, float]:
    """Return the peak of bytes and the seconds recomputed."""
    parts = [(part, True) if isinstance(part, tuple) else ((part,), False) for part in plan]
    left = [given["inputs"][blocks[0]] if again else given["saved"][blocks[0]] for blocks, again in parts]
    full = [sum(left[:number]) + given["saved"][list(blocks)].sum() for number, (blocks, _) in enumerate(parts)]
    return int(max(full)), float(sum(given["seconds"][list(blocks)].sum() for blocks, again in parts if again))


def wrong_peaks(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> dict[str, int]:
    """Return the peaks that known mistakes give."""
    inputs, saved = given["inputs"], given["saved"]
    parts = [(part, True) if isinstance(part, tuple) else ((part,), False) for part in plan]
    left = [int(inputs[blocks[0]] if again else saved[blocks[0]]) for blocks, again in parts]
    own = [int(saved[list(blocks)].sum()) for blocks, _ in parts]
    twice = [sum(left[: i + again]) + own[i] for i, (_, again) in enumerate(parts)]
    extra = [own[i] - left[i] for i in range(len(parts))]
    return {
        "a segment's own input counts twice": max(twice),
        "what later parts left is still held in backward": sum(left) + max(extra),
        "nothing is recomputed": int(saved.sum()),
        "what a segment computes again is forgotten": sum(left),
    }


def least_seconds(given: Arrays, budget: int) -> float | None:
    """Return the fewest seconds that a plan within the budget recomputes: for each block, by the bytes left so far."""
    inputs, saved, seconds = (given[name].tolist() for name in ("inputs", "saved", "seconds"))
    fewest: list[dict[int, float]] = [{0: 0.0}, *({} for _ in saved)]
    for first, ways in enumerate(fewest[:-1]):
        for end in range(first + 1, len(saved) + 1):
            stored = [(saved[first], 0.0)] if end == first + 1 else []
            for left, spent in ways.items():
                for kept, again in [(inputs[first], sum(seconds[first:end])), *stored]:
                    if left + sum(saved[first:end]) <= budget:
                        fewest[end][left + kept] = min(spent + again, fewest[end].get(left + kept, np.inf))
    return min(fewest[-1].values(), default=None)
