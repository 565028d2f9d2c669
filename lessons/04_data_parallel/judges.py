"""Lesson 04, tasks 1 and 2: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist import Communicator, Trace
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
    expect_ranks,
    sent_by,
)

SHAPES = ((4, 3), (4,), (4, 3), (4,), (2, 4), (2,))  # of weights and biases
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES)
BYTES = tuple(8 * size for size in SIZES)
FROZEN = 1  # the parameter that needs no gradient while ranks are made equal


class Towers(nn.Module):
    """Two layers side by side and one behind. Of the two, the one that runs first gets its gradient
    last.
    """

    def __init__(self, given: Arrays, rank: int = 0) -> None:
        super().__init__()
        pieces = torch.tensor(given["parameters"]).split(SIZES)
        self.values = nn.ParameterList(
            piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True)
        )
        self.order = (2, 0) if given["reordered"] and rank % 2 else (0, 2)
        # no parameter: every rank keeps its own
        self.register_buffer("own", torch.full((3,), float(rank)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [B, 2] of [B, 3]."""
        first, second = (
            functional.linear(inputs, self.values[at], self.values[at + 1]).tanh()
            for at in self.order
        )
        return functional.linear(first * second, self.values[4], self.values[5])


def steps_of(given: Arrays) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of each step."""
    return list(zip(torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True))


def part_of_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, rank: int = 0, ranks: int = 1
) -> Tensor:
    """Return what a rank brings to the loss of a batch: of one rank, the loss."""
    mine, wanted = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
    return (model(mine) - wanted).square().sum() / len(inputs)


def descend(model: nn.Module) -> None:
    """Take a step, and forget the gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None


def flat(tensors: Iterable[Tensor | None]) -> np.ndarray[Any, Any]:
    """Return tensors one after the other; for one that is missing, what is not a number."""
    return torch.cat(
        [torch.full((1,), torch.nan) if t is None else t.detach().flatten() for t in tensors]
    ).numpy()


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def part(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and see which rows the model is called with."""
    model, seen = Towers(given), list[Tensor]()
    inputs, targets = steps_of(given)[0]
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach().clone()))
    loss = exercise.local_loss(model, inputs, targets, comm)
    if not isinstance(loss, Tensor) or loss.dim():
        raise Wrong(f"local_loss returned {loss!r}, expected a tensor of one number, without dims")
    if loss.requires_grad:
        loss.backward()
    missing = sum(parameter.grad is None for parameter in model.parameters())
    results = {
        "loss": loss.item(),
        "calls": len(seen),
        "rows": torch.cat([inputs[:0], *seen]).numpy(),
    }
    return results | {"gradient": flat(p.grad for p in model.parameters()), "missing": missing}


def naive(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 in a loop; note the bytes of each collective."""
    model, trace = Towers(given, comm.rank), Trace()
    model.values[FROZEN].requires_grad_(False)
    comm.trace = trace
    exercise.start_equal(model, comm)
    model.values[FROZEN].requires_grad_(True)
    results: dict[str, Any] = {
        "start": flat(model.parameters()),
        "broadcasting": comm.traffic.messages,
    }
    results |= {"broadcasts": collectives(trace), "buffer": model.own.numpy().copy()}
    for inputs, targets in steps_of(given):
        part_of_loss(model, inputs, targets, comm.rank, comm.size).backward()
        exercise.sum_gradients(model, comm)
        results.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    sums = collectives(trace)[len(results["broadcasts"]) :]
    return results | {"sums": sums, "parameters": flat(model.parameters())}


def collectives(trace: Trace) -> list[int]:
    """Return the bytes of each collective of a rank, in order."""
    return [event.bytes for event in trace.events if event.kind == "collective"]


# ---------------------------------------------------------------- judges: in the grader's process


def serial(given: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Return the first gradient and the last parameters of a run on one rank."""
    model, found = Towers(given), dict[str, np.ndarray[Any, Any]]()
    for inputs, targets in steps_of(given):
        for _ in range(1 + int(given["quiet"])):
            part_of_loss(model, inputs, targets).backward()
        found.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    return found | {"parameters": flat(model.parameters())}


def gradient_of(
    given: Arrays, losses: Iterable[Callable[[nn.Module], Tensor]]
) -> np.ndarray[Any, Any]:
    """Return the sum of the gradients of some losses."""
    model = Towers(given)
    torch.stack([loss(model) for loss in losses]).sum().backward()
    return flat(p.grad for p in model.parameters())


def expect(rank: int, what: str, found: Any, expected: object, why: str = "") -> None:
    """Raise `Wrong` unless counts, or lists of them, are equal."""
    if found.tolist() != expected:
        raise Wrong(
            f"rank {rank}: {what} {found.tolist()}, expected {expected}" + f": {why}" * bool(why)
        )


def turned(parts: list[Tensor], shift: int) -> list[Tensor]:
    """Return of each rank r what rank r + shift has."""
    return parts[shift:] + parts[:shift]


def judge_part(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Losses and gradients add up, from one call each on the right rows."""
    inputs, targets = steps_of(case.given[0])[0]
    ranks, even = case.ranks, len(inputs) // case.ranks
    everyones = [mine.numpy() for mine in inputs.tensor_split(ranks)]
    wrong_rows = {
        "a rank computes on the whole batch": [inputs.numpy()] * ranks,
        "rank r takes rows r, r + P, r + 2 P, ...": [
            inputs[rank::ranks].numpy() for rank in range(ranks)
        ],
        "rows that P does not divide are dropped": (
            [inputs[rank * even : (rank + 1) * even].numpy() for rank in range(ranks)]
        ),
        "the last rank takes all rows that P does not divide": (
            [
                inputs[rank * even : (rank + 1) * even if rank < ranks - 1 else None].numpy()
                for rank in range(ranks)
            ]
        ),
        "every rank takes as many rows as the first, B / P rounded up": (
            [
                inputs[rank * -(-len(inputs) // ranks) :][: -(-len(inputs) // ranks)].numpy()
                for rank in range(ranks)
            ]
        ),
    }
    for rank, result in enumerate(results):
        expect(
            rank,
            "calls of the model:",
            result["calls"],
            1,
            "a rank without rows calls it, too, on no rows",
        )
    expect_ranks(
        "the rows it computed on",
        [each["rows"] for each in results],
        everyones,
        0.0,
        instead=wrong_rows,
    )
    for rank, result in enumerate(results):
        why = (
            "from no rows come gradients of 0, if the loss is computed from what the model returned"
        )
        if len(inputs.tensor_split(ranks)[rank]):
            why = "item(), detach(), .data or torch.tensor(...) cut the loss off from the model"
        expect(rank, "parameters without a gradient after backward():", result["missing"], 0, why)
    with torch.no_grad():
        model, many = Towers(case.given[0]), [len(mine) for mine in inputs.tensor_split(ranks)]
        loss = part_of_loss(model, inputs, targets).numpy()
        sums = [
            part_of_loss(model, inputs, targets, rank, ranks).numpy() * len(inputs)
            for rank in range(ranks)
        ]
        pairs = [
            [each.tensor_split(ranks)[rank] for rank in range(ranks)] for each in (inputs, targets)
        ]
        others = {
            shift: [
                (model(mine) - wanted)
                for mine, wanted in zip(pairs[0], turned(pairs[1], shift), strict=True)
            ]
            for shift in range(ranks)
            if not shift or len(inputs) % ranks == 0
        }
        absolute = np.sum([each.abs().sum().numpy() for each in others[0]]) / len(inputs)
        strange = {
            shift: np.sum([each.square().sum().numpy() for each in others[shift]])
            for shift in others
        }
    means = np.sum([one / max(1, n) for one, n in zip(sums, many, strict=True)], axis=0)
    wrong = {
        "each rank divides by the number of its own rows": means,
        "each rank divides by the number of its own rows and by P": means / ranks,
        "each rank takes the mean over all elements of its own rows": means / targets.shape[1],
        "outputs are averaged, not summed": loss / targets.shape[1],
        "each rank's part is divided by P once more": loss / ranks,
        "nothing is divided by the rows": loss * len(inputs),
        "the mean over inputs or outputs is taken, and the mean over the rows as well": loss
        / inputs.shape[1],
        "it is half of the squared error": loss / 2,
        "the error is not squared, but its absolute value taken": absolute,
        "each rank returns the loss of the whole batch, not its own part": loss * ranks,
        "the norm is taken, and not its square": np.sqrt(loss * len(inputs)) / len(inputs),
        **{
            f"the targets are those of rank r + {k}": value / len(inputs)
            for k, value in strange.items()
            if k
        },
    }
    whole = [np.allclose(result["loss"], loss) for result in results]
    wrong = {
        story: value for story, value in wrong.items() if not all(whole) or "whole batch" in story
    }
    found = np.sum([result["loss"] for result in results], axis=0)
    expect_close(0, "the sum of all ranks' losses", found, loss, instead=wrong)
    gradient = np.sum([result["gradient"] for result in results], axis=0)
    expect_close(0, "the sum of all ranks' gradients", gradient, serial(case.given[0])["gradient"])
    expect(
        0,
        "messages sent, by all ranks:",
        np.array(len([note for note in notes if note.kind == "send"])),
        0,
    )


def pieces() -> list[Any]:
    """Return for each parameter which of all numbers are its own."""
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    return [owner == number for number in range(len(SIZES))]


def in_another_way(found: Any, expected: list[int]) -> str:
    """Return what is wrong with a list of collectives, in words, if that can be told."""
    said = found.tolist()
    if said == expected[::-1] or sorted(said) == sorted(expected):
        return "they come in another order, perhaps from the last parameter to the first"
    if sorted(said) == sorted(expected * 2):
        return "each is sent twice, and what has been summed is summed again"
    if len(said) < len(expected) and sum(said) == sum(expected):
        return "several are put into one: one for each parameter, in order"
    if len(said) < len(expected):
        return "some are left out: frozen ones, or those that are 0, count as well"
    return ""


def judge_trained(case: Case, results: Sequence[Arrays]) -> None:
    """All ranks have the serial gradients and parameters, to the same bit."""
    expected, given = serial(case.given[0]), case.given[0]
    inputs, targets = steps_of(given)[0]
    own = [
        gradient_of(
            given, [lambda model, rank=rank: part_of_loss(model, inputs, targets, rank, case.ranks)]
        )
        for rank in range(case.ranks)
    ]
    tolerance = 1e-9 if expected["gradient"].dtype == np.float64 else 1e-5
    wrong: dict[str, Any] = {
        "the sums are divided by the number of ranks": [expected["gradient"] / case.ranks]
        * case.ranks,
        "a rank keeps its own gradient": own,
        "the sum is added to the rank's own gradient, which is in it already": [
            each + expected["gradient"] for each in own
        ],
    }
    for number, piece in enumerate(pieces()):
        wrong[
            f"of parameter {number} the rank keeps its own gradient, as if a copy had been summed"
        ] = [np.where(piece, each, expected["gradient"]) for each in own]
    found = [result["gradient"] for result in results]
    same = [expected["gradient"]] * case.ranks
    expect_ranks("the gradient of the first step", found, same, tolerance, instead=wrong)
    for rank, result in enumerate(results):
        expect_close(
            rank,
            "the parameters after the last step",
            result["parameters"],
            expected["parameters"],
            tolerance,
        )
        expect_equal(
            rank, "compared with rank 0, parameters", result["parameters"], results[0]["parameters"]
        )


def judge_naive(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks train as one; a broadcast and, in each step, an all-reduce a parameter."""
    parameters, steps = [given["parameters"] for given in case.given], len(case.given[0]["inputs"])
    first = sum(SIZES[:FROZEN])
    frozen = np.isin(np.arange(sum(SIZES)), range(first, first + SIZES[FROZEN]))
    wrong = {
        "nothing is broadcast, and each rank keeps the parameters that it drew": parameters,
        "parameters that need no gradient are left out": [
            np.where(frozen, own, parameters[0]) for own in parameters
        ],
        "all start from the mean of all ranks' parameters": [np.mean(parameters, axis=0)]
        * case.ranks,
        "all start from the sum of all ranks' parameters": [np.sum(parameters, axis=0)]
        * case.ranks,
        **{
            f"rank {k} is the root, and not rank 0": [parameters[k]] * case.ranks
            for k in range(1, case.ranks)
        },
    }
    for number, piece in enumerate(pieces()):
        if number != FROZEN:  # it is the only one that needs no gradient
            wrong[f"parameter {number} stays what the rank drew, as if a copy had been filled"] = [
                np.where(piece, own, parameters[0]) for own in parameters
            ]
        wrong[f"only parameter {number} is broadcast in place, and of the others a copy"] = [
            np.where(piece, parameters[0], own) for own in parameters
        ]
    found, same = [result["start"] for result in results], [parameters[0]] * case.ranks
    expect_ranks(
        "the parameters at the start", found, same, 1e-12, instead=wrong, before=parameters
    )
    for rank, result in enumerate(results):
        own = np.full_like(result["buffer"], rank)
        expect_equal(rank, "the model's buffer, which is no parameter,", result["buffer"], own)
        why = (
            in_another_way(result["broadcasts"], list(BYTES)) or "one for each parameter, in order"
        )
        expect(rank, "bytes of each broadcast:", result["broadcasts"], list(BYTES), why)
        why = "one for each parameter, in order, also of a gradient that is 0"
        why = in_another_way(result["sums"], list(BYTES) * steps) or why
        expect(rank, "bytes of each all-reduce:", result["sums"], list(BYTES) * steps, why)
        sent = len(sent_by(rank, notes)) - result["broadcasting"]
        why = "use algorithm='ring'"
        expect(
            rank, "messages of sum_gradients:", sent, 2 * (case.ranks - 1) * len(SIZES) * steps, why
        )
    sent = np.sum([result["broadcasting"] for result in results])
    expect(
        0,
        "messages of start_equal, of all ranks:",
        sent,
        len(SIZES) * (case.ranks - 1),
        "use algorithm='tree'",
    )
    judge_trained(case, results)
