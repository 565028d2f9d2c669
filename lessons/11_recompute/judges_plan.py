"""Lesson 11, tasks 1 and 4: the programs that ask for plans and their peaks, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known


def run_account(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    sizes = [given[name].tolist() for name in ("inputs", "saved", "seconds")]
    return {
        "found": [exercise.account(plan_of(marks), *sizes) for marks in given["marks"].tolist()],
        "lengths": [exercise.best_length(len(sizes[0]), *pair) for pair in given["sizes"].tolist()],
    }


def run_plan(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 with every budget; of each plan return rows (block, part, recomputed?), or nothing
    if refused.
    """
    found = {}
    for number, budget in enumerate(given["budgets"].tolist()):
        try:
            plan = exercise.fastest_plan(
                *(given[name].tolist() for name in ("inputs", "saved", "seconds")), budget
            )
        except ValueError:
            plan = ()
        if not isinstance(plan, list | tuple) or not all(
            isinstance(part, int | tuple | list) for part in plan
        ):
            raise Wrong(
                f"fastest_plan returns {plan!r}, expected the plan itself, like [0, (1, 2), 3]"
            )
        rows = [
            (part, i, 0) if isinstance(part, int) else (list(part), i, 1)
            for i, part in enumerate(plan)
        ]
        found[str(number)] = [
            (b, i, mark) for part, i, mark in rows for b in (part if mark else [part])
        ]
    return found


def judge_account(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Follow each plan, and try every length."""
    given = case.given[0]
    for marks, found in zip(given["marks"].tolist(), results[0]["found"].tolist(), strict=True):
        expected = follow(plan_of(marks), given)
        if tuple(found) != expected:
            asked, given_lists = (
                plan_of(marks),
                {name: given[name].tolist() for name in ("inputs", "saved", "seconds")},
            )
            says = (
                f"account of {asked} is {tuple(found)} (bytes, seconds), expected {expected}, "
                f"with {given_lists}"
            )
            if found[0] != expected[0]:
                raise Wrong(says + known(wrong_peaks(asked, given), found[0].__eq__))
            raise Wrong(says + known(wrong_seconds(asked, given), found[1].__eq__))
    count = len(given["inputs"])
    asked, answers = given["sizes"].tolist(), results[0]["lengths"].tolist()
    for (kept, saved), length in zip(asked, answers, strict=True):
        peaks = peaks_of(count, kept, saved)
        if length != (expected := peaks.index(min(peaks)) + 1):
            alike = 0 < length <= count and length % 1 == 0 and peaks[int(length) - 1] == min(peaks)
            why = ": of several the smallest k" if alike else ""
            why = why or known({clause: [way(count, *each) for each in asked] for clause, way in LENGTHS.items()},
                               answers.__eq__)  # fmt: skip
            raise Wrong(
                f"best_length({count}, {kept}, {saved}) is {length}, expected {expected}{why}"
            )


def peaks_of(count: int, kept: int, saved: int) -> list[int]:
    """Return the peak of segments of 1, 2, ... blocks."""
    return [k * saved + -(-count // k) * kept for k in range(1, count + 1)]


def smallest(peaks: Sequence[float]) -> int:
    """Return which length has the smallest peak."""
    return peaks.index(min(peaks)) + 1


LENGTHS: dict[str, Callable[[int, int, int], float]] = {
    "layers/k is rounded down; a last shorter segment has an input, too": lambda n, c, a: smallest(
        [k * a + n // k * c for k in range(1, n + 1)]
    ),
    "layers/k is not rounded": lambda n, c, a: smallest(
        [k * a + n / k * c for k in range(1, n + 1)]
    ),
    "the bytes of an input and those of a block are exchanged": lambda n, c, a: smallest(
        peaks_of(n, a, c)
    ),
    "a segment of all layers is never tried": lambda n, c, a: smallest(
        peaks_of(n, c, a)[: max(1, n - 1)]
    ),
    "the smallest peak is returned, in bytes, and not its length": lambda n, c, a: min(
        peaks_of(n, c, a)
    ),
    "the number of segments is returned, not their length": lambda n, c, a: (
        -(-n // smallest(peaks_of(n, c, a)))
    ),
    "the length counts from 0": lambda n, c, a: smallest(peaks_of(n, c, a)) - 1,
    "the largest peak is taken": lambda n, c, a: (
        peaks_of(n, c, a).index(max(peaks_of(n, c, a))) + 1
    ),
    "the largest of several lengths is taken": lambda n, c, a: (
        n - smallest(peaks_of(n, c, a)[::-1]) + 1
    ),
    "it is the root of layers, whatever a block and its input take": lambda n, c, a: round(n**0.5),
    "it is the root of layers * input/saved, rounded; with ceil(layers/k) the best may lie "
    "beside it": (lambda n, c, a: min(n, max(1, round((n * c / a) ** 0.5)))),
}


def judge_plan(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each plan fits, and recomputes no more than the best of all."""
    given = case.given[0]
    for number, budget in enumerate(given["budgets"].tolist()):
        rows, best = results[0][str(number)].reshape(-1, 3), least_seconds(given, budget)
        if not len(rows) and best is not None:
            raise Wrong(
                f"budget {budget} is refused, but there is a plan that fits"
                + misplanned(given, results[0])
            )
        if not len(rows):
            continue
        if rows[:, 0].tolist() != list(range(len(given["saved"]))):
            why = known(
                {"the plan is turned round": rows[::-1, 0].tolist()},
                list(range(len(given["saved"]))).__eq__,
            )
            raise Wrong(
                f"budget {budget}: blocks {rows[:, 0].tolist()} are planned, expected each once, "
                f"in order{why}"
            )
        plan = plan_of((rows[:, 1] + 1) * rows[:, 2])
        peak, seconds = follow(plan, given)
        if peak > budget or seconds != best:
            wanted = "a ValueError" if best is None else f"{best} seconds"
            why = f"which is more, {where_the_peak_is(plan, given)}" if peak > budget else ""
            why = why or "which fits, but recomputes more than it has to"
            says = f"budget {budget}: the plan {plan} takes {peak} bytes, {why}: "
            hint = misplanned(given, results[0])
            if not hint and best is not None and all(isinstance(part, tuple) for part in plan):
                hint = ": all blocks are computed again, and there is room to store some"
            raise Wrong(f"{says}{seconds} seconds again, expected {wanted}{hint}")


def where_the_peak_is(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> str:
    """Say which part of a plan takes it to its peak."""
    peaks = [follow(plan[: number + 1], given)[0] for number in range(len(plan))]
    part = plan[peaks.index(max(peaks))]
    if isinstance(part, tuple):
        return (
            f"while backward holds what all blocks of {part} save, and what the parts before it "
            "have left"
        )
    return f"with what block {part} and the parts before it have left in forward"


def misplanned(given: Arrays, found: Arrays) -> str:
    """Return which rule makes all these plans the best, in words that go behind the rejection, or
    nothing.
    """

    def same(how: str) -> bool:
        for number, budget in enumerate(given["budgets"].tolist()):
            rows = found[str(number)].reshape(-1, 3)
            best = least_seconds(given, budget, how)
            if not len(rows) or best is None:
                if len(rows) or best is not None:
                    return False
                continue
            plan = plan_of((rows[:, 1] + 1) * rows[:, 2])
            ones = {**given, "seconds": np.ones_like(given["seconds"])}
            if follow(plan, ones if how == "blocks" else given)[1] != best:
                return False
        return True

    return known({clause: how for how, clause in PLANS.items()}, same)


PLANS = {
    "strict": "a plan that takes just the budget is refused; it fits",
    "saves": "a segment leaves all that its blocks save; it leaves the input of its first block",
    "nothing": "a segment leaves nothing; it leaves the input of its first block",
    "blocks": "the fewest blocks are computed again, not the fewest seconds",
    "single": "each segment has one block, or leaves the inputs of all its blocks; it leaves that of its "
    "first",
    "pairs": "a segment has two blocks at most",
    "one segment": "there is one segment at most",
    "peak of forward": "what a segment computes again is not asked to fit, only what forward leaves",
    "largest block": "of a segment only the largest block has to fit; backward holds what all of them save",
    "last block": "what the last block saves does not count: backward holds it, too",
    "own input": "the input of a segment counts beside what its first block saves, which has it already",
}


def plan_of(marks: Sequence[int]) -> list[int | tuple[int, ...]]:
    """Return a plan from its marks: 0 is stored, equal neighbours are a segment."""
    groups = [
        (mark, [block for block, _ in run])
        for mark, run in groupby(enumerate(marks), key=lambda pair: pair[1])
    ]
    return [part for mark, blocks in groups for part in ([tuple(blocks)] if mark else blocks)]


def follow(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> tuple[int, float]:
    """Return the peak of bytes and the seconds recomputed."""
    parts = [(part, True) if isinstance(part, tuple) else ((part,), False) for part in plan]
    left = [
        given["inputs"][blocks[0]] if again else given["saved"][blocks[0]]
        for blocks, again in parts
    ]
    full = [
        sum(left[:number]) + given["saved"][list(blocks)].sum()
        for number, (blocks, _) in enumerate(parts)
    ]
    return int(max(full)), float(
        sum(given["seconds"][list(blocks)].sum() for blocks, again in parts if again)
    )


def wrong_peaks(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> dict[str, int]:
    """Return the peaks that known mistakes give."""
    inputs, saved = given["inputs"], given["saved"]
    parts = [(part, True) if isinstance(part, tuple) else ((part,), False) for part in plan]
    left = [int(inputs[blocks[0]] if again else saved[blocks[0]]) for blocks, again in parts]
    own = [int(saved[list(blocks)].sum()) for blocks, _ in parts]
    twice = [sum(left[: i + again]) + own[i] for i, (_, again) in enumerate(parts)]
    extra = [own[i] - left[i] for i in range(len(parts))]

    def most(left: Sequence[int], own: Sequence[int] = own) -> int:
        return max(sum(left[:i]) + each for i, each in enumerate(own))

    blocks = [list(part) for part, _ in parts]
    kept = [
        int(inputs[each].sum() if again else saved[each].sum())
        for each, (_, again) in zip(blocks, parts, strict=True)
    ]
    last = [
        int(inputs[each[-1]] if again else saved[each[-1]])
        for each, (_, again) in zip(blocks, parts, strict=True)
    ]
    return {
        "a segment's own input counts twice": max(twice),
        "what later parts left is still held in backward": sum(left) + max(extra),
        "what the last block saves does not count: backward holds it, too": follow(
            plan, {**given, "saved": np.append(saved[:-1], 0)}
        )[0],
        "what the last part holds does not count: backward holds it, too": most(
            left, [*own[:-1], 0]
        ),
        "nothing is recomputed": int(saved.sum()),
        "what a segment computes again is forgotten": sum(left),
        "a segment keeps the inputs of all its blocks, not of its first alone": most(kept),
        "a segment keeps the input of its last block, not of its first": most(last),
        "a segment keeps nothing": most(
            [0 if again else each for each, (_, again) in zip(left, parts, strict=True)]
        ),
        "a stored block never makes the peak": max(
            [sum(left[:i]) + own[i] for i, (_, again) in enumerate(parts) if again], default=0
        ),
        "of a segment only its largest block is held; backward holds what all of its blocks save": most(
            left, [int(saved[each].max()) for each in blocks]
        ),
        "what the parts before have left is forgotten": max(own),
    }


def wrong_seconds(plan: Sequence[int | tuple[int, ...]], given: Arrays) -> dict[str, float]:
    """Return the seconds that known mistakes give."""
    seconds, again = given["seconds"], [part for part in plan if isinstance(part, tuple)]
    each, total = sum(float(seconds[list(part)].sum()) for part in again), float(seconds.sum())
    return {
        "stored blocks are computed again, too": total,
        "stored blocks are computed again, and the others are not": total - each,
        "the first forward counts as well": total + each,
        "a segment is computed twice more": 2 * each,
        "the first block of a segment is not computed again; only its input is there": each
        - sum(float(seconds[part[0]]) for part in again),
        "the last block of a segment is not computed again; only the segment's input is there": each
        - sum(float(seconds[part[-1]]) for part in again),
        "of a segment only the first block is computed again": sum(
            float(seconds[part[0]]) for part in again
        ),
        "of a segment only the last block is computed again": sum(
            float(seconds[part[-1]]) for part in again
        ),
        "of a segment the longest block counts alone": sum(
            float(seconds[list(part)].max()) for part in again
        ),
        "of all segments the longest counts alone": max(
            [float(seconds[list(p)].sum()) for p in again], default=0.0
        ),
        "blocks are counted, not seconds": float(sum(map(len, again))),
        "bytes are counted, not seconds": float(
            sum(given["saved"][list(part)].sum() for part in again)
        ),
    }


def least_seconds(given: Arrays, budget: int, how: str = "") -> float | None:
    """Return the fewest seconds that a plan within the budget recomputes: for each block, by the
    bytes left so far.

    `how` is one of `PLANS`.
    """
    inputs, saved, seconds = (given[name].tolist() for name in ("inputs", "saved", "seconds"))
    seconds, budget = [1.0] * len(saved) if how == "blocks" else seconds, budget - (how == "strict")
    fewest: list[dict[tuple[int, int], float]] = [{(0, 0): 0.0}, *({} for _ in saved)]
    saved = [*saved[:-1], 0] if how == "last block" else saved
    longest = {"single": 1, "pairs": 2}.get(how, len(saved))
    for first, ways in enumerate(fewest[:-1]):
        for end in range(first + 1, len(saved) + 1):
            own, needs = sum(saved[first:end]), sum(saved[first:end])
            leaves = {"saves": own, "nothing": 0}.get(how, inputs[first])
            needs = {"peak of forward": leaves, "largest block": max(saved[first:end])}.get(
                how, needs
            )
            needs += inputs[first] if how == "own input" else 0
            for (left, segments), spent in ways.items():
                ways_on = [(saved[first], own, 0.0, 0)] if end == first + 1 else []
                if end - first <= longest and not (how == "one segment" and segments):
                    ways_on.append(
                        (leaves, needs, sum(seconds[first:end]), int(how == "one segment"))
                    )
                for kept, room, again, more in ways_on:
                    if left + room <= budget:
                        at = (left + kept, segments + more)
                        fewest[end][at] = min(spent + again, fewest[end].get(at, np.inf))
    return min(fewest[-1].values(), default=None)
