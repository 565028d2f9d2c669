"""Lesson 20, task 3: the program that runs beside an answer, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import nan
from types import ModuleType
from typing import Any

from judges import (
    Layout,
    Machine,
    Model,
    layout_of,
    machine_of,
    model_of,
    own,
    same,
    seconds_of,
)
from judges_memory import bytes_of, room_of

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

REASONS = ("", "gpus", "node", "heads", "layers", "batch", "stages", "memory")


def run_best(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `best`; -1 stands for None."""
    layouts = [own(exercise, layout_of(row)) for row in given["layouts"].tolist()]
    asked = (
        own(exercise, model_of(given)),
        own(exercise, machine_of(given)),
        layouts,
        int(given["batch"]),
    )
    chosen, refused = exercise.best(*asked)
    if chosen is not None and int(chosen) < 0:
        raise Wrong(
            f"best chooses layout {chosen}, expected a number from 0, or None if all are refused"
        )
    if [each for each in refused if each not in REASONS] or len(refused) != len(layouts):
        raise Wrong(
            f"best refuses for {refused!r}, expected one of REASONS for each of the "
            f"{len(layouts)} layouts"
        )
    model, machine, _, batch = asked
    seconds = [nan] * len(layouts)  # as the answer's own task 1 has them
    for number, layout in enumerate(layouts):
        with suppress(Exception):
            seconds[number] = float(sum(exercise.step(model, machine, layout, batch).values()))
    return {
        "seconds": seconds,
        "chosen": -1 if chosen is None else int(chosen),
        "refused": [REASONS.index(each) for each in refused],
    }


def judge_best(
    case: Case,
    results: Sequence[Arrays],
    notes: Sequence[Note],
    about: Sequence[str] = REASONS,
    choose: bool = True,
) -> None:
    """Compare why layouts are refused, of those that are for some reasons, and which is chosen."""
    given = case.given[0]
    model, machine, batch = model_of(given), machine_of(given), int(given["batch"])
    layouts = [layout_of(row) for row in given["layouts"].tolist()]
    expected = [refusal(model, machine, layout, batch) for layout in layouts]
    for number, (layout, code) in enumerate(
        zip(layouts, results[0]["refused"].tolist(), strict=True)
    ):
        found = REASONS[int(code)]
        if found != expected[number] and expected[number] in about:
            true = reasons(model, machine, layout, batch)
            because = why(model, machine, layout, batch)
            hint = ". The first reason that is true counts" if found in true else ""
            hint = (
                f". {found!r} is not true: {because['not ' + found]}"
                if found and found not in true
                else hint
            )
            raise Wrong(
                f"layout {number}, {layout.words()}, is "
                f"{f'refused for {found!r}' if found else 'accepted'}, expected "
                f"{expected[number]!r}: {because[expected[number]]}{hint}"
            )
    best = choice(model, machine, layouts, batch)
    if choose and (chosen := int(results[0]["chosen"])) != best:
        says = (
            f"the best is layout {chosen if chosen >= 0 else None}, expected "
            f"{best if best >= 0 else None}"
        )
        none = (
            ": all are refused, so there is no best one"
            if best < 0
            else ": some are not refused, so one is the best"
        )
        raise Wrong(
            says
            + (
                loses(model, machine, layouts, batch, chosen, best, results[0]["seconds"].tolist())
                if min(chosen, best) >= 0
                else none
            )
        )


def loses(
    model: Model,
    machine: Machine,
    layouts: Sequence[Layout],
    batch: int,
    chosen: int,
    best: int,
    own_seconds: Sequence[float],
) -> str:
    """Say why a choice is not the best; the answer's own `step` may be the reason."""
    if chosen >= len(layouts):
        return f": there are {len(layouts)} layouts, counted from 0"
    left = [i for i, each in enumerate(layouts) if not refusal(model, machine, each, batch)]
    if reason := refusal(model, machine, layouts[chosen], batch):
        says = (
            f": it chooses one that is refused, for {reason!r}. First what does not fit is "
            "refused, then time counts"
        )
        counted = {
            "layouts are counted from 1": best + 1,
            "only those are counted that are left": left.index(best),
        }
        return says + known(counted, chosen.__eq__).replace(": this", ". This")
    (slow, more), (fast, fewer) = (
        measured(model, machine, layouts[i], batch) for i in (chosen, best)
    )
    if not same(slow, fast):
        costs = [(seconds_of(model, machine, layouts[i], batch), i) for i in left]
        says = f": a step takes {slow:.4g} s there, and {fast:.4g} s on the best"
        if own_seconds[chosen] <= own_seconds[best]:
            wrong = {"task 1 is wrong: the answer's own `step` has it the other way": True}
            return says + known(wrong, bool)
        guesses = {
            f"{part} does not count": min(
                (sum(each.values()) - each[part], i) for each, i in costs
            )[1]
            for part in ("recomputing", "tensor", "bubble", "data")
        }
        guesses |= {
            "its place among those that are not refused is returned, not that among all": left.index(
                best
            ),
            "computing alone counts": min((each["computing"], i) for each, i in costs)[1],
            "the first that fits is taken; all are to be compared": left[0],
            "the slowest is taken": max((sum(each.values()), i) for each, i in costs)[1],
            "the fewest bytes count first; what fits, fits": min(
                left, key=lambda i: measured(model, machine, layouts[i], batch)[1]
            ),
        }
        fitting = {
            ", or if ".join(story for story in guesses if guesses[story] == chosen): chosen
            in guesses.values()
        }
        return says + known(fitting, bool)
    if not same(more, fewer):
        return (
            f": both are as fast, but a GPU holds {more / 1e9:.4g} GB there, and "
            f"{fewer / 1e9:.4g} GB on the best"
        )
    return ": of those that are alike in all, the first is wanted"


def reasons(model: Model, machine: Machine, layout: Layout, batch: int) -> list[str]:
    """Return all reasons to refuse a layout, the first first."""
    dp, tp, pp, v, b, *_ = layout
    checks = {
        "gpus": dp * tp * pp != machine.gpus,
        "node": tp > machine.node,
        "heads": model.heads % tp != 0,
        "layers": model.layers % (pp * v) != 0,
        "batch": batch % (dp * b) != 0,
        "stages": batch < pp * dp * b,
    }
    checks["memory"] = sum(bytes_of(model, layout, batch).values()) > room_of(machine)
    return [reason for reason, true in checks.items() if true]


def refusal(model: Model, machine: Machine, layout: Layout, batch: int) -> str:
    """Return why a layout is refused."""
    return next(iter(reasons(model, machine, layout, batch)), "")


def measured(model: Model, machine: Machine, layout: Layout, batch: int) -> tuple[float, float]:
    """Return seconds and bytes."""
    return sum(seconds_of(model, machine, layout, batch).values()), sum(
        bytes_of(model, layout, batch).values()
    )


def choice(model: Model, machine: Machine, layouts: Sequence[Layout], batch: int) -> int:
    """Return the number of the best layout, -1 if all are refused."""
    left = [i for i, layout in enumerate(layouts) if not refusal(model, machine, layout, batch)]
    if not left:
        return -1
    costs = {i: measured(model, machine, layouts[i], batch) for i in left}
    fastest = min(seconds for seconds, _ in costs.values())
    alike = {i: bytes for i, (seconds, bytes) in costs.items() if same(seconds, fastest)}
    return next(i for i in sorted(alike) if same(alike[i], min(alike.values())))


def why(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, str]:
    """Return for each reason what is behind it."""
    dp, tp, pp, v, b, *_ = layout
    bytes, room = sum(bytes_of(model, layout, batch).values()) / 1e9, room_of(machine) / 1e9
    return {
        "": f"it fits, with {bytes:.1f} of {room:.1f} GB, and all numbers divide",
        "gpus": f"it uses {dp * tp * pp} GPUs, and there are {machine.gpus}",
        "node": f"tp={tp} crosses nodes of {machine.node} GPUs",
        "heads": f"tp={tp} does not divide {model.heads} heads",
        "layers": f"{pp} stages of {v} parts are {pp * v}, and there are {model.layers} layers",
        "batch": f"{batch} sequences are not {dp} parts of whole microbatches of {b}",
        "stages": f"a replica has {batch // (dp * b)} microbatches for {pp} stages: the batch is "
        "divided by dp first",
        "memory": f"a GPU holds {bytes:.1f} GB, and has room for {room:.1f} GB",
        "not gpus": f"it uses all {machine.gpus} GPUs",
        "not node": f"tp={tp} lies within a node of {machine.node} GPUs",
        "not heads": f"tp={tp} divides {model.heads} heads",
        "not layers": f"{pp} stages of {v} parts are {pp * v}, which divides {model.layers} layers",
        "not batch": f"{batch} sequences are {dp} parts of {batch // (dp * b)} microbatches of {b}",
        "not stages": f"a replica has {batch // (dp * b)} microbatches, and {pp} stages need no more than "
        f"{pp}",
        "not memory": f"a GPU holds {bytes:.1f} GB, and has room for {room:.1f} GB",
    }
