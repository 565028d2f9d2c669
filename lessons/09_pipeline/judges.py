"""Lesson 09, tasks 1 to 4: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong
from minidist.parallel.pipeline import Plan, ScheduleError, check, peak_activations, read_plan, simulate


def packed(text: str) -> Array:
    """Return a text as numbers, which is what goes to a rank and comes back."""
    return np.frombuffer(text.encode(), np.uint8)


def unpacked(array: Array) -> str:
    return array.tobytes().decode()


def cut(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    parts = exercise.cut_layers(given["costs"].tolist(), int(given["stages"]))
    return {"layers": [layer for part in parts for layer in part], "lengths": [len(part) for part in parts]}


def clock(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2: a time, or NaN if the answer says that the schedule gets stuck."""
    rows = [bare(line) for line in unpacked(given["schedule"]).splitlines()]
    try:
        return {"length": float(exercise.step_length(rows, *given["costs"].tolist()))}
    except ValueError:
        return {"length": np.nan}


def bare(line: str) -> list[str]:
    """Return the words without the stage in front, as the exercise has them: its number is the rank's."""
    return [word.lstrip("0123456789") for word in line.split()]


def all_gpipe(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    return rows_of(exercise.gpipe, *given["sizes"].tolist())


def all_1f1b(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    return rows_of(exercise.one_forward_one_backward, *given["sizes"].tolist())


def rows_of(schedule: Callable[[int, int, int], Sequence[str]], ranks: int, microbatches: int) -> dict[str, Any]:
    """Ask a function for every rank's words."""
    rows = [" ".join(f"{rank}{word}" for word in schedule(rank, ranks, microbatches)) for rank in range(ranks)]
    return {"schedule": packed("\n".join(rows))}


def judge_cut(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All layers once and in order, at least one each, and no cut has a cheaper most expensive stage."""
    costs, stages = case.given[0]["costs"], int(case.given[0]["stages"])
    lengths, layers = results[0]["lengths"].tolist(), results[0]["layers"].tolist()
    if layers != list(range(len(costs))) or len(lengths) != stages or min(lengths) < 1:
        raise Wrong(
            f"the layers, one stage after the other, are {layers} in stages of {lengths}, expected 0 to "
            f"{len(costs) - 1} in {stages} stages of at least one"
        )
    upto = np.concatenate([[0.0], np.cumsum(costs)])
    best = np.where(upto > 0, upto, np.inf)  # the most expensive stage, of the first k layers in one stage
    for _ in range(stages - 1):
        best = np.array([min([np.inf, *np.maximum(best[:k], upto[k] - upto[:k])]) for k in range(len(upto))])
    each = np.diff(upto[np.cumsum([0, *lengths])])
    if max(each) > best[-1]:
        squares = np.where(upto > 0, upto**2, np.inf)  # the same, of the smallest sum of squares
        for _ in range(stages - 1):
            squares = np.array([min([np.inf, *squares[:k] + (upto[k] - upto[:k]) ** 2]) for k in range(len(upto))])
        even = [len(part) for part in np.array_split(costs, stages)]
        hint = ": that is the smallest sum of squares" if np.isclose((each**2).sum(), squares[-1]) else ""
        hint = ": that is as many layers in each, whatever they cost" if lengths == even else hint
        raise Wrong(
            f"stages of {lengths} layers: the most expensive costs {max(each):g}, but {best[-1]:g} is possible{hint}"
        )


def judge_clock(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The package's simulator says the same."""
    found, (forward, backward) = float(results[0]["length"]), case.given[0]["costs"].tolist()
    try:
        timeline = simulate(read_plan(unpacked(case.given[0]["schedule"])), forward, backward)
    except ScheduleError as error:
        if found == found:
            why = str(error).splitlines()[0]
            raise Wrong(f"step_length is {found:.6g}, expected ValueError: these ranks get stuck ({why})") from None
        return
    expected, ranks, microbatches = timeline.length, timeline.plan.ranks, timeline.plan.microbatches
    if found != found:
        raise Wrong(f"step_length raised ValueError, but the schedule can be run, in {expected:.6g}")
    if not abs(found - expected) <= 1e-9 * expected:
        instead = {
            "that is when the last rank is done, but others still work": timeline.end[-1][-1],
            "that is when rank 0 is done": timeline.end[0][-1],
            "that is the formula for GPipe and 1F1B": (microbatches + ranks - 1) * (forward + backward),
            "that is the work of one rank, without any waiting": microbatches * (forward + backward),
        }
        hint = next((f": {story}" for story, value in instead.items() if abs(found - value) <= 1e-9 * value), "")
        raise Wrong(
            f"step_length is {found:.6g} if F takes {forward:.6g} and B {backward:.6g}, expected {expected:.6g}{hint}"
        )


def expect_schedule(case: Case, results: Sequence[Arrays]) -> Plan:
    """Return the answer's schedule; raise `Wrong` unless it can be run, in order, and is no longer than GPipe's."""
    ranks, microbatches = case.given[0]["sizes"].tolist()
    try:
        schedule = read_plan(unpacked(results[0]["schedule"]))
        check(schedule)
    except ScheduleError as error:
        raise Wrong(str(error)) from None
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        raise Wrong(f"{schedule.ranks} ranks do {schedule.microbatches} microbatches, expected {ranks}, {microbatches}")
    for rank, row in enumerate(schedule.actions):
        for kind in "FB":
            order = [action.microbatch for action in row if action.kind == kind]
            if order != list(range(microbatches)):
                raise Wrong(f"rank {rank} takes the microbatches of its {kind} in the order {order}")
    for forward, backward in ((1, 2), (0.7, 1.9)):
        found, expected = simulate(schedule, forward, backward).bubble, (ranks - 1) / (microbatches + ranks - 1)
        if found > expected + 1e-9:
            costs = f"F takes {forward:g}, B {backward:g}"
            raise Wrong(f"the bubble is {found:.1%} of the step ({costs}), expected {expected:.1%}")
    return schedule


def judge_gpipe(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """All forwards, then all backwards."""
    schedule = expect_schedule(case, results)
    for rank, row in enumerate(schedule.actions):
        kinds = "".join(action.kind for action in row)
        if kinds != "".join(sorted(kinds, reverse=True)):
            raise Wrong(f"rank {rank} does {' '.join(kinds)}, expected all F before all B")
    return {"bubble of GPipe": simulate(schedule, 1, 2).bubble}


def judge_1f1b(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """GPipe's bubble, at most p - r microbatches held."""
    schedule = expect_schedule(case, results)
    held = peak_activations(schedule)
    for rank, found in enumerate(held):
        most = min(schedule.ranks - rank, schedule.microbatches)
        if found > most:
            raise Wrong(f"rank {rank} holds up to {found} microbatches, expected at most {most}")
    return {"bubble of 1F1B": simulate(schedule, 1, 2).bubble, "microbatches held by 1F1B": max(held)}
