"""Lesson 04, task 4: the program that runs beside an answer, and its judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from judges import Towers, expect, flat, gradient_of, serial, steps_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
    sent_by,
)
from minidist.full.collectives import all_reduce


def accumulated(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 with gradients that are summed as they come; with `failing`, the model raises in
    its second call.
    """
    model, arrivals, calls, seen, ends = (
        Towers(given),
        list[int](),
        list[int](),
        list[Tensor](),
        list[int](),
    )
    outputs, held = list[StorageWeakRef](), [0]
    inputs, targets = steps_of(given)[0]
    gradients = SimpleNamespace(synchronising=True, finish=lambda: ends.append(len(arrivals)))

    def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        calls.append(len(arrivals))
        held.append(sum(not output.expired() for output in outputs))
        seen.append(arguments[0].detach().clone())
        if given["failing"] and len(seen) == 2:
            raise ArithmeticError("the second microbatch does not fit, say")

    def arrived(parameter: Any) -> None:
        arrivals.append(1)
        if gradients.synchronising:
            all_reduce(parameter.grad, comm, algorithm="ring")

    model.register_forward_pre_hook(look)
    model.register_forward_hook(
        lambda _, __, output: outputs.append(StorageWeakRef(output.untyped_storage()))
    )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    failed = False
    try:
        exercise.accumulate(model, gradients, inputs, targets, int(given["microbatches"]), comm)
    except ArithmeticError:
        failed = True
    results = {
        "synchronising": gradients.synchronising,
        "ends": ends,
        "failed": failed,
        "calls": calls,
    }
    results |= {"held": max(held), "rows": torch.cat([inputs[:0], *seen]).numpy()}
    return results | {"gradient": flat(p.grad for p in model.parameters())}


def judge_accumulated(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The gradient is the serial one, from forward and backward in turns, of which the last
    communicates.
    """
    given, parts = case.given[0], int(case.given[0]["microbatches"])
    inputs, targets = steps_of(given)[0]
    whole = serial(given)["gradient"]
    mine = [inputs.tensor_split(case.ranks), targets.tensor_split(case.ranks)]
    pairs = [
        pair for some, wanted in zip(*mine, strict=True) for pair in cut_both(some, wanted, parts)
    ]
    by_own_rows = [
        lambda model, some=some, wanted=wanted: (
            (model(some) - wanted).square().sum() / max(1, len(some))
        )
        for some, wanted in pairs
    ]

    def by_parts(
        chosen: Iterable[int], ranks: Iterable[int] = range(case.ranks), own_rows: bool = False
    ) -> Any:
        """Return the gradient of some parts of some ranks."""
        total = np.zeros_like(whole)
        for rank in ranks:
            rows = len(inputs.tensor_split(case.ranks)[rank]) if own_rows else len(inputs)
            for some, wanted in (pairs[rank * parts + part] for part in chosen):
                loss = partial(squared, some=some, wanted=wanted, rows=max(1, rows))
                total = total + gradient_of(given, [loss])
        return total

    for rank, result in enumerate(results):
        expect(
            rank,
            "synchronising at the end:",
            result["synchronising"],
            True,
            "also when an error leaves it",
        )
        if given["failing"]:
            expect(rank, "the model's error comes out:", result["failed"], True)
            why = "after an error the other ranks may never launch what it waits for"
            expect(rank, "calls of finish():", np.array(len(result["ends"])), 0, why)
            continue
        why = f"torch.tensor_split gives {parts} parts, and one with no rows is run like any other"
        expect(rank, "calls of the model:", np.array(len(result["calls"])), parts, why)
        wrong = {
            "the batch is cut into microbatches first, and each of them over the ranks": torch.cat(
                [some.tensor_split(case.ranks)[rank] for some in inputs.tensor_split(parts)]
            )
        }
        expect_equal(
            rank, "the rows it computed on", result["rows"], mine[0][rank].numpy(), instead=wrong
        )
        calls, why = (
            [6 * n for n in range(parts)],
            "backward of a part comes before forward of the next",
        )
        expect(rank, "gradients there at each call of the model:", result["calls"], calls, why)
        if result["held"] > 1:
            raise Wrong(
                f"rank {rank}: what the model returned for {result['held']} earlier parts is "
                "still held when it is called again, expected 1 at most: a list that refers to "
                "it keeps it"
            )
        expect(
            rank,
            "gradients there at each finish():",
            result["ends"],
            [6 * parts],
            "once, in the end",
        )
        sent, why = np.array(len(sent_by(rank, notes))), "only the last backward communicates"
        why += ": here none does" * (not sent) + ": here all do" * bool(
            sent == parts * 2 * (case.ranks - 1) * 6
        )
        expect(rank, "messages sent:", sent, 2 * (case.ranks - 1) * 6, why)
        scales = {
            "each part's loss is divided by the number of parts": whole / parts,
            "each part's loss is divided by its own rows": lambda: gradient_of(given, by_own_rows),
            "each part's loss is divided by the number of ranks": whole / case.ranks,
            "each part's loss is divided by the outputs as well, as a mean over all elements": whole
            / targets.shape[1],
            "each part's loss is divided by the elements of the inputs, not by their rows": whole
            / inputs.shape[1],
            "nothing is divided by the rows": whole * len(inputs),
            "each part's loss is divided by the rank's own rows": lambda: by_parts(
                range(parts), own_rows=True
            ),
            "gradients of the parts before the last are forgotten": lambda: by_parts([parts - 1]),
            "the first part alone counts": lambda: by_parts([0]),
            "the last part is left out": lambda: by_parts(range(parts - 1)),
            "only the first backward communicates, and the others stay on their rank": (
                lambda rank=rank: by_parts([0]) + by_parts(range(1, parts), [rank])
            ),
            "only the last backward's gradients are summed over the ranks": (
                lambda rank=rank: by_parts([parts - 1]) + by_parts(range(parts - 1), [rank])
            ),
            "nothing is summed over the ranks": lambda rank=rank: by_parts(range(parts), [rank]),
        }
        expect_close(rank, "the gradient", result["gradient"], whole, instead=scales)


def squared(model: nn.Module, some: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """Return the loss of some rows, as a part of a mean over so many."""
    loss: Tensor = (model(some) - wanted).square().sum() / rows
    return loss


def cut_both(inputs: Tensor, targets: Tensor, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the parts of a rank's rows."""
    return list(zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True))
