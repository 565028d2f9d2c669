"""Lesson 10, tasks 2 to 4: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minidist import Communicator
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Figures,
    Note,
    Wrong,
    expect_close,
    sent_by,
)
from minidist.full.pipeline import (
    Plan,
    ScheduleError,
    check,
    peak_activations,
    plan,
    read_plan,
    simulate,
    with_communication,
)
from minidist.full.pipeline.executor import Pipeline

ROWS, WIDTH = 2, 4  # of a microbatch
MESSAGE = ROWS * WIDTH * 8  # bytes


def label_of(ranks: int, microbatches: int, chunks: int) -> str:
    return f"{ranks} ranks, {microbatches} microbatches" + f", {chunks} chunks" * (chunks > 1)


def all_interleaved(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 for every rank."""
    ranks, microbatches, chunks = given["sizes"].tolist()
    return {
        "schedule": packed(
            [exercise.interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)]
        )
    }


def all_zb_h1(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 for every rank."""
    ranks, microbatches, _ = given["sizes"].tolist()
    return {
        "schedule": packed([exercise.zb_h1(rank, ranks, microbatches) for rank in range(ranks)])
    }


def packed(rows: Sequence[Sequence[str]]) -> Array:
    """Return a schedule as numbers, which is what goes back to the judge."""
    return np.frombuffer("\n".join(map(" ".join, rows)).encode(), np.uint8)


def unpacked(array: Array) -> Plan:
    return read_plan(array.tobytes().decode())


def carried_out(ask: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a program that carries out the answer's schedule with the package's executor."""

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        answer = ask(exercise, comm, given)
        try:
            schedule = with_communication(unpacked(answer["schedule"]))
        except ScheduleError:
            return answer  # of which the judge says what is wrong
        p, _, v = given["sizes"].tolist()
        if schedule.rank_of != tuple(range(p)) * v:
            return answer  # which goes for this as well
        own = {stage: stage_of(given["weights"][stage]) for stage in schedule.stages_of(comm.rank)}
        pipeline = Pipeline(own, comm, schedule, loss_of(given), torch.empty_like)
        pipeline.step(
            *([torch.tensor(each) for each in given[name]] for name in ("inputs", "targets"))
        )
        return {
            **answer,
            **{f"gradient {number}": gradient_of(stage) for number, stage in own.items()},
        }

    return program


def stage_of(weight: Array) -> nn.Sequential:
    """Return one stage: a linear layer and tanh."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.tensor(weight))
    return nn.Sequential(layer, nn.Tanh())


def loss_of(given: Arrays) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, target: ((y - target) ** 2).sum() / given["targets"].size


def gradient_of(stage: nn.Sequential) -> Array:
    gradient: Tensor | None = stage[0].weight.grad
    return np.zeros(0) if gradient is None else gradient.numpy()


class Products(TorchFunctionMode):
    """Counts matrix products, whatever they are called by."""

    names = (
        "__matmul__",
        "__rmatmul__",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "addmm_",
        "einsum",
        "tensordot",
        "linear",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("grad", "backward"):
            raise Wrong(
                "autograd is called, but is not allowed here: compute the gradients with matrix "
                "products"
            )
        self.count += name in self.names
        return function(*args, **(kwargs or {}))


def split(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run both halves of task 3, counting their work and what is kept between them."""
    weights = [torch.tensor(value) for name, value in given.items() if name.startswith("weight")]
    activations = [torch.tensor(given["x"])]
    for weight in weights:
        activations.append(torch.tanh(activations[-1] @ weight.T))
    seed = torch.tensor(given["gradient"])
    handed, before = (
        (*weights, *activations, seed),
        [each.clone() for each in (*weights, *activations, seed)],
    )
    with torch.inference_mode(), Products() as first:  # in which autograd remembers nothing
        gradient, pairs = exercise.backward_for_inputs(weights, activations, seed)
    kept = sum(each.nbytes for pair in pairs for each in pair)
    with torch.inference_mode(), Products() as second:
        gradients = exercise.backward_for_weights(pairs)
    found = {f"weight {number}": each.detach().numpy() for number, each in enumerate(gradients)}
    changed = [not torch.equal(was, now) for was, now in zip(before, handed, strict=True)]
    work = [first.count, second.count]
    return {**found, "x": gradient.detach().numpy(), "kept": kept, "work": work, "changed": changed}


def in_the_words(text: str, p: int, m: int, v: int, kinds: str) -> str:
    """Return what can be seen in the words of a schedule without running it, with a colon behind
    it.

    `kinds` are the kinds of which each rank has each microbatch once, the one first that ends the
    warm-up.
    """
    rows = [line.split() for line in text.splitlines()]
    if any(word[:1] in "FBIW" for row in rows for word in row):
        return "a word begins with the number of its stage, as 2F0: "
    if not all(re.fullmatch(r"\d+[FBIW]\d+", word) for row in rows for word in row):
        return ""
    for rank, row in enumerate(rows):
        have = {word[len(word.rstrip("0123456789")) - 1 :] for word in row}
        if kinds == "IW" and any(word[0] == "B" for word in have):
            return (
                f"rank {rank} has words of kind B: here I and W stand for it, each in its own "
                "place: "
            )
        stages = range(rank, p * v, p)
        if v > 1 and {int(re.split("[FB]", word)[0]) for word in row} == set(range(v)):
            return "stages are numbered from 0 on each rank, as chunks are: "
        needed = [f"{s}{kind}{k}" for kind in "F" + kinds for s in stages for k in range(m)]
        if missing := [word for word in needed if word not in row]:
            return f"rank {rank} has no {missing[0]}: "
        for kind in "FB" * (kinds == "B"):
            order = stages if kind == "F" else stages[::-1]
            right = [
                f"{s}{kind}{k}"
                for first in range(0, m, p)
                for s in order
                for k in range(first, first + p)
            ]
            if (found := [word for word in row if kind in word]) != right:
                at = next(
                    at
                    for at, pair in enumerate(zip(found, right, strict=False))
                    if pair[0] != pair[1]
                )
                said = (
                    f"number {at + 1} of the {kind} of rank {rank} is {found[at]}, expected "
                    f"{right[at]}"
                )
                return (
                    f"{said}: p microbatches through a chunk, in order, then the same through the "
                    "next: "
                )
    before = [
        row[: next((at for at, word in enumerate(row) if kinds[0] in word), len(row))]
        for row in rows
    ]
    ahead = [sum("F" in word for word in row) for row in before]
    right = [min(m * v, (v - 1) * p + (2 if v > 1 else 1) * (p - r - 1) + 1) for r in range(p)]
    if ahead != right:
        turn = ", as if the backward came first in each turn"
        turn *= all(found == most - 1 for found, most in zip(ahead, right, strict=True))
        if ahead == [min(m * v, most + 1) for most in right]:
            turn = ", as if the warm-up were one forward longer"
        return (
            f"rank by rank {ahead} forwards stand before the first {kinds[0]}, expected "
            f"{right}{turn}: "
        )
    return ""


def owed_at_the_end(text: str) -> str:
    """Return how many W stand behind the last I, rank by rank, with a colon behind it."""
    rows = [line.split() for line in text.splitlines()]
    owed = [
        len(row) - 1 - max((at for at, word in enumerate(row) if "I" in word), default=0)
        for row in rows
    ]
    most = list(range(1, len(rows) + 1))
    if owed == most:
        return ""
    if owed == [sum("W" in word for word in row) for row in rows]:
        return "no W is done before the last I, so every microbatch is held until then: "
    if set(owed) == {1}:
        return "every W directly follows its I, so none is left to fill the waits in the end: "
    what = f"W stand behind the last I, expected {most}: rank r keeps r back for its waits"
    return f"rank by rank {owed} {what}: "


def expect_schedule(case: Case, results: Sequence[Arrays]) -> Plan:
    """Return the answer's schedule; raise `Wrong` unless it can be run, with the placement and the
    sizes asked for.
    """
    p, m, v = case.given[0]["sizes"].tolist()
    try:
        schedule = unpacked(results[0]["schedule"])
        check(schedule)
    except ScheduleError as error:
        text = results[0]["schedule"].tobytes().decode()
        raise Wrong(in_the_words(text, p, m, v, "B" if v > 1 else "IW") + str(error)) from None
    if schedule.rank_of != tuple(range(p)) * v or schedule.microbatches != m:
        raise Wrong(
            f"there are {schedule.microbatches} microbatches and the stages are on ranks "
            f"{list(schedule.rank_of)}, expected {m} and {list(range(p)) * v}"
        )
    return schedule


def judge_interleaved(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """The bubble is (p - 1)/(v m + p - 1), messages are hidden and no more is held than in
    Megatron-LM's order.
    """
    schedule, (p, m, v) = expect_schedule(case, results), case.given[0]["sizes"].tolist()
    for rank, row in enumerate(schedule.actions):
        stages = range(rank, p * v, p)
        for kind, order in (("F", stages), ("B", stages[::-1])):
            expected = [
                f"{s}{kind}{k}"
                for first in range(0, m, p)
                for s in order
                for k in range(first, first + p)
            ]
            if (found := [str(action) for action in row if action.kind == kind]) != expected:
                orders = (" ".join(each[: 2 * p + 1]) for each in (found, expected))
                raise Wrong(
                    f"rank {rank} does its {kind} in the order {' ..., expected '.join(orders)} ..."
                )
    for forward, backward in ((1, 2), (0.7, 1.9)):
        found, expected = simulate(schedule, forward, backward).bubble, (p - 1) / (v * m + p - 1)
        if found > expected + 1e-9:
            costs = f"F takes {forward:g}, B {backward:g}"
            raise Wrong(f"the bubble is {found:.1%} of the step ({costs}), expected {expected:.1%}")
    reference = plan("interleaved", p, m, v)
    held = zip(peak_activations(schedule), peak_activations(reference), strict=True)
    for rank, (found, most) in enumerate(held):
        if found > most:
            seen = in_the_words(results[0]["schedule"].tobytes().decode(), p, m, v, "B")
            raise Wrong(
                f"{seen}rank {rank} holds up to {found} microbatches of one stage, expected at "
                f"most {most}"
            )
    found, most = (simulate(each, 1, 2, latency=0.1).length for each in (schedule, reference))
    if found > most + 1e-9:
        raise Wrong(
            f"F takes 1, B 2 and a message 0.1: the step takes {found:g}, expected {most:g}: warm "
            "up longer"
        )
    return {"bubble of interleaved": simulate(schedule, 1, 2).bubble}


def judge_zb_h1(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """Each rank idles (p - 1)(F + I - W) at most, and holds what the first rank of 1F1B holds."""
    schedule, (p, m, _) = expect_schedule(case, results), case.given[0]["sizes"].tolist()
    seen = in_the_words(results[0]["schedule"].tobytes().decode(), p, m, 1, "IW")
    for rank, row in enumerate(schedule.actions):
        held = max(accumulate({"F": 1, "W": -1, "B": -1}.get(action.kind, 0) for action in row))
        if held > p:
            seen = seen or owed_at_the_end(results[0]["schedule"].tobytes().decode())
            raise Wrong(
                f"{seen}rank {rank} holds {held} microbatches whose F is done and whose W is not, "
                f"expected {p}"
            )
        for kind in "FIW":
            order = [action.microbatch for action in row if action.kind == kind]
            if order != sorted(order):
                why = "each kind takes them in order, from 0 on"
                raise Wrong(
                    f"rank {rank} takes the microbatches of its {kind} in the order {order}: {why}"
                )
    for forward, input, weight in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.6)):
        most = (p - 1) * (forward + input - weight)
        idle = simulate(schedule, forward, input + weight, input, weight).idle
        rank = int(np.argmax(idle))
        if idle[rank] > most + 1e-9:
            costs = f"F takes {forward:g}, I {input:g}, W {weight:g}"
            seen = seen or owed_at_the_end(results[0]["schedule"].tobytes().decode())
            raise Wrong(
                f"{seen}rank {rank} idles {idle[rank]:g} ({costs}), expected at most {most:g}"
            )
    return {"bubble of ZB-H1": simulate(schedule, 1, 2, 1, 1).bubble}


def judge_carried_out(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial gradients, and two messages for each microbatch and each cut between ranks."""
    expect_schedule(case, results)
    given, (p, m, v) = case.given[0], case.given[0]["sizes"].tolist()
    stages = [stage_of(weight) for weight in given["weights"]]
    x, target = (torch.tensor(given[name]).flatten(0, 1) for name in ("inputs", "targets"))
    loss_of(given)(nn.Sequential(*stages)(x), target).backward()
    for rank, result in enumerate(results):
        for stage in range(rank, p * v, p):
            found, name = (
                result.get(f"gradient {stage}", np.zeros(0)),
                f"the gradient of stage {stage}",
            )
            expect_close(rank, name, found, gradient_of(stages[stage]))
    sent = [note for rank in range(p) for note in sent_by(rank, notes)]
    expected, found = 2 * m * (p * v - 1) * MESSAGE, sum(note.bytes for note in sent)
    if found != expected:
        raise Wrong(f"all ranks together sent {found} bytes, expected {expected}")
