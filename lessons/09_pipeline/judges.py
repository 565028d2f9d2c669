"""Lesson 09, tasks 1 to 4: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, known
from minidist.full.pipeline import (
    Plan,
    ScheduleError,
    check,
    peak_activations,
    read_plan,
    simulate,
)


def packed(text: str) -> Array:
    """Return a text as numbers, which is what goes to a rank and comes back."""
    return np.frombuffer(text.encode(), np.uint8)


def unpacked(array: Array) -> str:
    return array.tobytes().decode()


def cut(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    parts = exercise.cut_layers(given["costs"].tolist(), int(given["stages"]))
    return {
        "layers": [layer for part in parts for layer in part],
        "lengths": [len(part) for part in parts],
    }


def clock(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2: a time, or NaN if the answer says that the schedule gets stuck."""
    rows = [bare(line) for line in unpacked(given["schedule"]).splitlines()]
    try:
        return {"length": float(exercise.step_length(rows, *given["costs"].tolist()))}
    except ValueError:
        return {"length": np.nan}


def bare(line: str) -> list[str]:
    """Return the words without the stage in front, as the exercise has them: its number is the
    rank's.
    """
    return [word.lstrip("0123456789") for word in line.split()]


def all_gpipe(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    return rows_of(exercise.gpipe, *given["sizes"].tolist())


def all_1f1b(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    return rows_of(exercise.one_forward_one_backward, *given["sizes"].tolist())


def rows_of(
    schedule: Callable[[int, int, int], Sequence[str]], ranks: int, microbatches: int
) -> dict[str, Any]:
    """Ask a function for every rank's words."""
    rows = []
    for rank in range(ranks):
        words = schedule(rank, ranks, microbatches)
        if isinstance(words, str):
            raise Wrong(
                f"rank {rank} returned one text, {words!r}, expected a list of words, such as "
                "['F0', 'B0']"
            )
        for word in words:
            if not (isinstance(word, str) and word[:1] in ("F", "B") and word[1:].isdecimal()):
                raise Wrong(
                    f"rank {rank} returned the word {word!r}, expected only F or B and a "
                    "microbatch, as in 'F3'"
                )
        rows.append(" ".join(f"{rank}{word}" for word in words))
    return {"schedule": packed("\n".join(rows))}


def judge_cut(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All layers once and in order, at least one each, and no cut has a cheaper most expensive
    stage.
    """
    costs, stages = case.given[0]["costs"], int(case.given[0]["stages"])
    lengths, layers = results[0]["lengths"].tolist(), results[0]["layers"].tolist()
    if layers != list(range(len(costs))) or len(lengths) != stages or min(lengths) < 1:
        raise Wrong(
            f"the layers, one stage after the other, are {layers} in stages of {lengths}, "
            f"expected 0 to {len(costs) - 1} in {stages} stages of at least "
            f"one{badly_cut(layers, lengths, stages)}"
        )
    upto = np.concatenate([[0.0], np.cumsum(costs)])
    # the most expensive stage, of the first k layers in one stage
    best = np.where(upto > 0, upto, np.inf)
    for _ in range(stages - 1):
        best = np.array(
            [min([np.inf, *np.maximum(best[:k], upto[k] - upto[:k])]) for k in range(len(upto))]
        )
    each = np.diff(upto[np.cumsum([0, *lengths])])
    if max(each) > best[-1]:
        squares = np.where(upto > 0, upto**2, np.inf)  # the same, of the smallest sum of squares
        for _ in range(stages - 1):
            squares = np.array(
                [min([np.inf, *squares[:k] + (upto[k] - upto[:k]) ** 2]) for k in range(len(upto))]
            )
        even = [len(part) for part in np.array_split(costs, stages)]
        hint = (
            ": that is the smallest sum of squares"
            if np.isclose((each**2).sum(), squares[-1])
            else ""
        )
        hint = ": that is as many layers in each, whatever they cost" if lengths == even else hint
        hint = hint or next(
            (
                f": {story}"
                for story, cut in quick_cuts(costs.tolist(), stages).items()
                if cut == lengths
            ),
            "",
        )
        hint = hint or (
            ": where a stage ends cannot be settled from the layers before it alone, so try every "
            "last stage"
        )
        raise Wrong(
            f"stages of {lengths} layers: the most expensive costs {max(each):g}, but "
            f"{best[-1]:g} is possible{hint}"
        )


def badly_cut(layers: Sequence[int], lengths: Sequence[int], stages: int) -> str:
    """Return what is wrong with ranges that are no cut at all."""
    if twice := sorted({layer for layer in layers if list(layers).count(layer) > 1}):
        return f": layers {twice} are in two stages, since a range ends before its stop"
    if min(lengths, default=1) < 1:
        return ": a stage is empty"
    return f": there are {len(lengths)} stages" * (len(lengths) != stages)


def quick_cuts(costs: Sequence[float], stages: int) -> dict[str, list[int]]:
    """Return how many layers each stage has if cuts are made by a quick rule."""
    mean, found = sum(costs) / stages, {}
    for story, early in (
        ("a stage ends before it is dearer than the mean", 1),
        ("a stage ends once it has the mean", 0),
    ):
        ends, held = list[int](), 0.0
        for layer, cost in enumerate(costs):
            left, open_stages = len(costs) - layer, stages - len(ends)
            full = held + early * cost > mean if early else held >= mean
            start = ends[-1] if ends else 0
            if layer > start and open_stages > 1 and (full or left < open_stages):
                ends, held = [*ends, layer], 0.0
            held += cost
        found[f"that is what comes out if {story}"] = np.diff([0, *ends, len(costs)]).tolist()
    parts = [(0, len(costs))]
    while len(parts) < stages:
        first, last = max(
            (one for one in parts if one[1] - one[0] > 1), key=lambda one: sum(costs[slice(*one)])
        )
        middle = min(
            range(first + 1, last), key=lambda at: max(sum(costs[first:at]), sum(costs[at:last]))
        )
        at = parts.index((first, last))
        parts[at : at + 1] = [(first, middle), (middle, last)]
    found["that is what comes out if the dearest stage is cut in two, again and again"] = [
        b - a for a, b in parts
    ]
    return found


def in_rounds(timeline: Any, forward: float, backward: float) -> float:
    """Return the time if all ranks begin their words together, and wait for the longest of them."""
    rows, done, at, time = timeline.plan.actions, set[str](), [0] * timeline.plan.ranks, 0.0
    while any(here < len(row) for here, row in zip(at, rows, strict=True)):
        begun = []
        for rank, row in enumerate(rows):
            if at[rank] < len(row):
                word = str(row[at[rank]]).lstrip("0123456789")
                before = (
                    [f"{rank - 1}{word}"] * (rank > 0) if word[0] == "F" else [f"{rank}F{word[1:]}"]
                )
                before += [f"{rank + 1}{word}"] * (word[0] == "B" and rank < len(rows) - 1)
                if done.issuperset(before):
                    begun.append((rank, word))
        if not begun:
            return np.nan
        time += max(forward if word[0] == "F" else backward for _, word in begun)
        for rank, word in begun:
            done.add(f"{rank}{word}")
            at[rank] += 1
    return time


def judge_clock(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The package's simulator says the same."""
    found, (forward, backward) = float(results[0]["length"]), case.given[0]["costs"].tolist()
    try:
        timeline = simulate(read_plan(unpacked(case.given[0]["schedule"])), forward, backward)
    except ScheduleError as error:
        if found == found:
            why = str(error).splitlines()[0]
            raise Wrong(
                f"step_length is {found:.6g}, expected ValueError: these ranks get stuck ({why})"
            ) from None
        return
    expected, ranks, microbatches = timeline.length, timeline.plan.ranks, timeline.plan.microbatches
    if found != found:
        raise Wrong(
            f"step_length raised ValueError, but the schedule can be run, in {expected:.6g}"
        )
    if not abs(found - expected) <= 1e-9 * expected:
        instead = {
            "that is when the last rank is done, but others still work": timeline.end[-1][-1],
            "that is when rank 0 is done": timeline.end[0][-1],
            "that is the formula for GPipe and 1F1B": (microbatches + ranks - 1)
            * (forward + backward),
            "that is the work of one rank, without any waiting": microbatches
            * (forward + backward),
            "that is one microbatch through all ranks and back: a rank does one word at a time": ranks
            * (forward + backward),
            "that is the work of all ranks together, one after the other": ranks
            * microbatches
            * (forward + backward),
            "F takes the time of B, and B that of F": simulate(
                timeline.plan, backward, forward
            ).length,
            "B takes the time of F": simulate(timeline.plan, forward, forward).length,
            "F takes the time of B": simulate(timeline.plan, backward, backward).length,
            "all ranks wait for each other after each word": in_rounds(timeline, forward, backward),
            "that is a first microbatch through all ranks and back, and the dearer of F and B "
            "for each other": (
                ranks * (forward + backward) + (microbatches - 1) * max(forward, backward)
            ),
        }
        hint = next(
            (
                f": {story}"
                for story, value in instead.items()
                if abs(found - value) <= 1e-9 * value
            ),
            "",
        )
        raise Wrong(
            f"step_length is {found:.6g} if F takes {forward:.6g} and B {backward:.6g}, "
            f"expected {expected:.6g}{hint}"
        )


def expect_schedule(case: Case, results: Sequence[Arrays]) -> Plan:
    """Return the answer's schedule; raise `Wrong` unless it can be run, in order, and is no longer
    than GPipe's.
    """
    ranks, microbatches = case.given[0]["sizes"].tolist()
    try:
        schedule = read_plan(unpacked(results[0]["schedule"]))
        check(schedule)
    except ScheduleError as error:
        raise Wrong(
            in_the_words(unpacked(results[0]["schedule"]), ranks, microbatches) + str(error)
        ) from None
    if (schedule.ranks, schedule.microbatches) != (ranks, microbatches):
        few = ": the last ones are left out" * (schedule.microbatches < microbatches)
        said = (
            f"{schedule.ranks} ranks do {schedule.microbatches} microbatches, expected {ranks}, "
            f"{microbatches}"
        )
        raise Wrong(said + few)
    for rank, row in enumerate(schedule.actions):
        for kind in "FB":
            order = [action.microbatch for action in row if action.kind == kind]
            if order != list(range(microbatches)):
                how = (
                    "from the last to the first"
                    if order == sorted(order, reverse=True)
                    else "not from 0 on"
                )
                raise Wrong(
                    f"rank {rank} takes the microbatches of its {kind} in the order {order}, {how}"
                )
    for forward, backward in ((1, 2), (0.7, 1.9)):
        found, expected = (
            simulate(schedule, forward, backward).bubble,
            (ranks - 1) / (microbatches + ranks - 1),
        )
        if found > expected + 1e-9:
            costs = f"F takes {forward:g}, B {backward:g}"
            said = f"the bubble is {found:.1%} of the step ({costs}), expected {expected:.1%}"
            why = in_the_words(unpacked(results[0]["schedule"]), ranks, microbatches).removesuffix(
                ": "
            )
            raise Wrong(said + f": {why}" * bool(why))
    return schedule


def in_the_words(text: str, ranks: int, microbatches: int) -> str:
    """Return what can be seen in the words of a schedule without running it, with a colon behind
    it.
    """
    rows = [bare(line) for line in text.splitlines()]
    numbers = {int(word[1:]) for row in rows for word in row}
    if numbers == set(range(1, microbatches + 1)):
        return "microbatches are counted from 1, expected from 0: "
    for kind, other, what in (
        ("F", "B", "forwards behind"),
        ("B", "F", "backwards behind the last forward"),
    ):
        for rank, row in enumerate(rows):
            done, missing = [
                {int(word[1:]) for word in row if word[0] == each} for each in (kind, other)
            ]
            if missing - done:
                return f"rank {rank} lacks {kind}{min(missing - done)}: are the {what} left out? "
    ahead = [next((at for at, word in enumerate(row) if word[0] == "B"), len(row)) for row in rows]
    right = [min(ranks - rank, microbatches) for rank in range(ranks)]
    if ahead not in (right, [microbatches] * ranks):
        return (
            f"rank by rank {ahead} forwards stand before the first backward, where 1F1B has "
            f"{right}{too_many(ahead, ranks, microbatches)}: "
        )
    return ""


def judge_gpipe(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """All forwards, then all backwards."""
    schedule = expect_schedule(case, results)
    for rank, row in enumerate(schedule.actions):
        kinds = "".join(action.kind for action in row)
        if kinds != "".join(sorted(kinds, reverse=True)):
            raise Wrong(f"rank {rank} does {' '.join(kinds)}, expected all F before all B")
    return {"bubble of GPipe": simulate(schedule, 1, 2).bubble}


def too_many(held: Sequence[int], ranks: int, microbatches: int) -> str:
    """Return which other warm-up holds so many on each rank, in words behind the rejection."""
    ways = {
        "all forwards come before the first backward, as in GPipe": [microbatches] * ranks,
        "each rank warms up one forward too long: p - r - 1 come before the first turn, which "
        "begins with a forward itself": [ranks - rank + 1 for rank in range(ranks)],
        "each rank warms up two forwards too long": [ranks - rank + 2 for rank in range(ranks)],
        "each rank warms up twice as long as the first backward needs": [
            2 * (ranks - rank - 1) + 1 for rank in range(ranks)
        ],
        "every rank warms up as long as rank 0": [ranks] * ranks,
        "every rank warms up with p forwards": [ranks + 1] * ranks,
        "ranks are counted from the wrong end: the last one warms up longest": [
            rank + 1 for rank in range(ranks)
        ],
        "ranks are counted from the wrong end, and warm up one forward too long": [
            rank + 2 for rank in range(ranks)
        ],
    }
    found = list(held)
    return known(
        {how: [min(n, microbatches) for n in most] for how, most in ways.items()}, found.__eq__
    )


def judge_1f1b(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """GPipe's bubble, at most p - r microbatches held."""
    schedule = expect_schedule(case, results)
    held = peak_activations(schedule)
    for rank, found in enumerate(held):
        most = min(schedule.ranks - rank, schedule.microbatches)
        if found > most:
            said = f"rank {rank} holds up to {found} microbatches, expected at most {most}"
            raise Wrong(said + too_many(held, schedule.ranks, schedule.microbatches))
    return {
        "bubble of 1F1B": simulate(schedule, 1, 2).bubble,
        "microbatches held by 1F1B": max(held),
    }
