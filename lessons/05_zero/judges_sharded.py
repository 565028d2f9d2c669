"""Lesson 05, tasks 2 and 3: the judge of the sharded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from judges import ITEM, RATE, SIZES, Stack, expect, flat, loss_of, serial
from torch import Tensor, nn

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
)


def judge_sharded(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial numbers, from slices, for the bytes of an all-reduce; in stage 2 no gradient
    stays.
    """
    given, ranks = case.given[0], case.ranks
    expected, (steps, backwards) = serial(given), given["inputs"].shape[:2]
    without_decay = partial(torch.optim.AdamW, weight_decay=0.0)
    coupled = partial(torch.optim.Adam, weight_decay=0.01)
    wrong: dict[str, dict[str, Any]] = {
        "the optimizer has its own default of lr, not the lr that is given": {"rate": 1e-3},
        "lr is divided by the number of ranks": {"rate": RATE / ranks},
        "lr is multiplied by the number of ranks": {"rate": RATE * ranks},
        "the update is that of SGD": {"optimizer": torch.optim.SGD},
        "AdamW's weight decay, which is 0.01 by default, is left out": {"optimizer": without_decay},
        "the optimizer is Adam, whose weight decay goes through the moments": {
            "optimizer": coupled
        },
        "zero_grad leaves gradients of the step before": {"forgets": False},
        "only the last backward of a step counts": {"only_last": True},
        "gradients are averaged over the ranks": {"divided_by": ranks},
    }
    if backwards > 1:
        wrong["gradients are averaged over the backwards of a step"] = {
            "divided_by": int(backwards)
        }
    of_gradient = [*wrong][[*wrong].index("only the last backward of a step counts") :]
    own = [serial_of(given, rank, ranks) for rank in range(ranks)]
    for rank, result in enumerate(results):
        sizes = [len(np.array_split(np.empty(size), ranks)[rank]) for size in SIZES]
        expect(
            f"rank {rank}",
            "elements of its slices:",
            result["slices"],
            sizes,
            "those of torch.tensor_split",
        )
        expect(f"rank {rank}", "numbers in the optimizer's state:", result["state"], 2 * sum(sizes))
        expect(
            f"rank {rank}",
            "steps that AdamW has counted:",
            np.unique(result["steps"]),
            [float(steps)],
            how_often(result["steps"], steps),
        )
        if given["stage"] == 2:
            expect(
                f"rank {rank}",
                "most earlier gradients held when one came:",
                result["held"].max(),
                0,
                FREE,
            )
        expect_kept(rank, result["kept"].tolist(), ITEM * sum(sizes))
    if given["counted"]:
        one = (ranks - 1) * sum(SIZES) * ITEM * steps  # of a reduce-scatter, or an all-gather
        sent = int(np.sum([result["bytes"] for result in results]))
        alike = all(np.array_equal(results[0]["parameters"], r["parameters"]) for r in results)
        lacking = "gradients are not reduced" if alike else "parameters are not gathered"
        why = lacking if sent == backwards * one else ""
        twice = "an all-reduce sends twice what a reduce-scatter or an all-gather does"
        why = twice if sent > (backwards + 1) * one else why
        expect("all ranks", "bytes sent:", np.array(sent), (backwards + 1) * one, why)
    for rank, result in enumerate(results):

        def sliced(gradients: Sequence[Tensor], rank: int = rank) -> Array:
            return flat(whole.tensor_split(ranks)[rank] for whole in gradients)

        there = sliced(expected["gradient"]) + float(given["there"])
        story = "reduce adds to the gradient that a slice has: called twice, it would count twice"
        added = {story: there} if given["there"] else {}

        def gradient_by(mistake: dict[str, Any], sliced: Callable[..., Array] = sliced) -> Array:
            return sliced(serial(given, **mistake)["gradient"])

        expect_close(
            rank,
            "the slices' first gradients, one after the other,",
            result["gradient"],
            sliced(expected["gradient"]),
            instead={how: partial(gradient_by, wrong[how]) for how in of_gradient} | added,
            parts=[sliced(gradients) for gradients in own],
            others=[sliced(expected["gradient"], other) for other in range(ranks)],
        )
        expect_gathered(
            rank, given, [each["parameters"] for each in results], expected["parameters"]
        )
        expect_close(
            rank,
            "the parameters after the last step",
            result["parameters"],
            expected["parameters"],
            instead={how: partial(parameters_by, given, mistake) for how, mistake in wrong.items()}
            | {
                "slices are gathered before they are updated, not after": partial(
                    gathered_early, given
                )
            },
        )
        expect_equal(
            rank, "compared with rank 0, parameters", result["parameters"], results[0]["parameters"]
        )


FREE = (
    "the hook sets parameter.grad to None, and keeps nothing of it: zeros, or a later zero_grad, "
    "still hold memory"
)


def how_often(found: Array, steps: int) -> str:
    """Return what to say of AdamW's count of steps."""
    most = found.max() if found.size else steps
    return (
        "a step of ours is one of AdamW"
        if most > steps
        else "AdamW, made anew in a step, forgets its moments"
    )


def serial_of(given: Arrays, rank: int, ranks: int) -> list[Tensor]:
    """Return what one rank has of the first gradient, by parameter, before anything is summed."""
    model = Stack(given)
    for some, wanted in zip(
        torch.tensor(given["inputs"][0]), torch.tensor(given["targets"][0]), strict=True
    ):
        loss_of(model, some, wanted, rank, ranks).backward()
    return [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]


def expect_gathered(rank: int, given: Arrays, found: Sequence[Array], expected: Array) -> None:
    """Raise `Wrong` if others' slices are as at the start, or if each rank's slice is newer there
    than elsewhere.
    """
    ranks = len(found)
    owner = np.concatenate(
        [
            np.repeat(
                np.arange(ranks), [len(part) for part in np.array_split(np.empty(size), ranks)]
            )
            for size in SIZES
        ]
    )
    if found[rank].shape != expected.shape or np.allclose(found[rank], expected) or ranks == 1:
        return
    foreign = owner != rank
    if np.array_equal(found[rank][foreign], given["parameters"][foreign]):
        raise Wrong(
            f"rank {rank}: in the end the parameters of other ranks' slices are what they were at "
            "the start, expected what their owners have: gather into the model's own parameters, "
            "not into a copy"
        )
    fresh = [
        not np.array_equal(found[one][owner == one], found[other][owner == one])
        for one in range(ranks)
        for other in range(ranks)
        if other != one and (owner == one).any()
    ]
    agree = all(
        np.array_equal(found[one][owner == third], found[other][owner == third])
        for third in range(ranks)
        for one in range(ranks)
        for other in range(ranks)
        if third not in (one, other)
    )
    if all(fresh) and agree:
        raise Wrong(
            f"rank {rank}: in the end each rank has another value of its own slices than all "
            "others have, who agree: this is what comes out if slices are gathered before they "
            "are updated, not after"
        )


def gathered_early(given: Arrays) -> Array:
    """Return the last parameters if the model always has those of the step before, and slices are
    copies.
    """
    model = Stack(given)
    slices = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    steps = torch.optim.AdamW(slices, lr=RATE)
    for inputs, targets in zip(
        torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True
    ):
        model.zero_grad()
        for some, wanted in zip(inputs, targets, strict=True):
            loss_of(model, some, wanted).backward()
        for mine, parameter in zip(slices, model.parameters(), strict=True):
            mine.grad = parameter.grad
            parameter.data = mine.detach().clone()
        steps.step()
    return flat(model.parameters())


def parameters_by(given: Arrays, mistake: dict[str, Any]) -> Array:
    """Return the last parameters that a mistake gives."""
    found: Array = serial(given, **mistake)["parameters"]
    return found


def expect_kept(rank: int, found: list[int], own: int) -> None:
    """Raise `Wrong` if more is held than slices, their gradients and AdamW's state; `own` is one
    set of slices.
    """
    view = "a view keeps the whole of what it is a view of"
    for what, held, most, why in (
        ("the slices", found[0], own, view),
        ("the slices' gradients", found[1], own, view),
        ("AdamW's state", found[2], 2 * own, "it is built over the slices, and nothing else"),
        ("what the answer keeps besides", found[3], own, "whole gradients, or a copy of the model"),
        (
            "in the midst of backward the slices' gradients and the rest",
            found[4],
            own,
            "whole gradients",
        ),
    ):
        if held > most:
            raise Wrong(
                f"rank {rank}: {what} held {held} bytes at some time, expected {most} at most: "
                f"{why}"
            )
