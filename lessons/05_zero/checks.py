"""Lesson 05: what is checked, and for how many points. In float64, ranks differ from a serial run by rounding only."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minidist import Communicator
from minidist.grade import contract
from minidist.grade.contract import Arrays, Case, Check, Draw, Note, Task, Wrong, expect_close, expect_equal, sent_by

BY_HAND = ("minidist.parallel", "minidist.memory", "torch.distributed.optim")
EQUATION = Task(1, "the memory equation", BY_HAND)
STATE = Task(2, "ZeRO-1", BY_HAND, imports=contract.BY_OPTIMIZERS)
GRADIENTS = Task(3, "ZeRO-2", BY_HAND, imports=contract.BY_OPTIMIZERS)
CLIP = Task(4, "clipping", BY_HAND)

SHAPES = ((5, 3), (5,), (2, 5), (2,))  # of weights and biases
SIZES = tuple(int(np.prod(shape)) for shape in SHAPES)
ITEM, RATE = 8, 0.05


class Stack(nn.Module):
    """Two layers."""

    def __init__(self, given: Arrays) -> None:
        super().__init__()
        pieces = zip(torch.tensor(given["parameters"]).split(SIZES), SHAPES, strict=True)
        self.values = nn.ParameterList(piece.reshape(shape) for piece, shape in pieces)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.linear(inputs, self.values[0], self.values[1]).tanh()
        return nn.functional.linear(hidden, self.values[2], self.values[3])


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, rank: int = 0, ranks: int = 1) -> Tensor:
    """Return what a rank brings to the loss of a batch: of one rank, the loss."""
    mine, wanted = inputs.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
    return (model(mine) - wanted).square().sum() / len(inputs)


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    """Return tensors one after the other; for one that is missing, what is not a number."""
    return torch.cat([torch.full((1,), torch.nan) if t is None else t.detach().flatten() for t in tensors]).numpy()


def batches(*ranks: int, stage: int, steps: int = 3, backwards: int = 1, counted: bool = True) -> Draw:
    """Draw one case for each number of ranks: parameters, and a batch for each backward of each step."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for many in ranks:
            given: dict[str, Any] = {"stage": stage, "counted": counted, "parameters": rng.normal(size=sum(SIZES))}
            given |= {name: rng.normal(size=(steps, backwards, 7, n)) for name, n in (("inputs", 3), ("targets", 2))}
            arrays = {name: np.asarray(value) for name, value in given.items()}
            cases.append(Case((arrays,) * many, f"ranks {many}" + (f", backwards {backwards}" * (backwards > 1))))
        return cases

    return draw


def questions(*asked: tuple[float, int, int]) -> Draw:
    """Ask for models of (parameters, ranks, stage), as they are given, and multiplied by a random number."""

    def draw(rng: np.random.Generator) -> list[Case]:
        rows = [[int(scale * size), ranks, stage] for size, ranks, stage in asked for scale in (1, 1 + rng.random())]
        return [Case(({"questions": np.array(rows)},), f"{len(rows)} questions")]

    return draw


def slices(*ranks: int, limit: float, broken: bool = False) -> Draw:
    """Draw gradients of slices, of other lengths on each rank, one of them infinite if it is to be broken."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for many in ranks:
            gradients = [rng.normal(size=int(rng.integers(2, 6))) * (1 + rank) for rank in range(many)]
            gradients[-1][0] = np.inf if broken else gradients[-1][0]
            cases.append(Case(tuple({"gradient": g, "limit": np.array(limit)} for g in gradients), f"ranks {many}"))
        return cases

    return draw


def equation(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1: the second half is asked what the first half has answered."""
    asked = given["questions"].tolist()
    states = [exercise.model_states(*question) for question in asked]
    sizes = [exercise.largest_model(80e9, ranks, stage) for _, ranks, stage in asked]
    return {"states": np.array(states, float), "sizes": sizes}


def sharded(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 or 3 in a loop; count how many of the model's gradients are held when another comes."""
    model, passed, held = Stack(given), list[StorageWeakRef](), list[int]()

    def look(new: Any = None) -> None:
        there = sum(parameter.grad is not None for parameter in model.parameters() if parameter is not new)
        held.append(max(there, sum(not memory.expired() for memory in passed)))
        if new is not None:
            passed.append(StorageWeakRef(new.grad.untyped_storage()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    zero = (exercise.ZeRO1 if given["stage"] == 1 else exercise.ZeRO2)(model, comm, RATE)
    results, before = dict[str, Any](), comm.traffic.bytes_sent
    for inputs, targets in zip(torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True):
        zero.zero_grad()
        for some, wanted in zip(inputs, targets, strict=True):
            loss_of(model, some, wanted, comm.rank, comm.size).backward()
        zero.reduce()
        results.setdefault("gradient", flat(piece.grad for piece in zero.slices))
        look()
        passed.clear()
        zero.step()
    states = list(zero.adamw.state.values())
    results |= {"bytes": comm.traffic.bytes_sent - before, "held": held, "parameters": flat(model.parameters())}
    results |= {"state": sum(value.numel() for state in states for value in state.values() if value.dim())}
    return results | {"slices": [len(piece) for piece in zero.slices], "steps": [float(s["step"]) for s in states]}


def clipped(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 on two slices, of which one is empty on some ranks."""
    parts = torch.tensor(given["gradient"]).split([2 * (comm.rank % 2), len(given["gradient"]) - 2 * (comm.rank % 2)])
    pieces = [nn.Parameter(torch.zeros_like(part)) for part in parts]
    for piece, part in zip(pieces, parts, strict=True):
        piece.grad = part.clone()
    norm = exercise.clip(pieces, float(given["limit"]), comm)
    return {"norm": float(norm), "gradient": flat(piece.grad for piece in pieces)}


def serial(given: Arrays) -> dict[str, Any]:
    """Return the first gradient, by parameter, and the last parameters of a run on one rank."""
    model, found = Stack(given), dict[str, Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for inputs, targets in zip(torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True):
        optimizer.zero_grad()
        for some, wanted in zip(inputs, targets, strict=True):
            loss_of(model, some, wanted).backward()
        found.setdefault("gradient", [parameter.grad.flatten() for parameter in model.parameters()])
        optimizer.step()
    return found | {"parameters": flat(model.parameters())}


def expect(who: str, what: str, found: Any, expected: object) -> None:
    """Raise `Wrong` unless counts, or lists of them, are equal."""
    if found.tolist() != expected:
        raise Wrong(f"{who}: {what} {found.tolist()}, expected {expected}")


def judge_equation(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """2 + 2 + 12 bytes, each divided from its stage on."""
    for question, states, size in zip(case.given[0]["questions"].tolist(), *results[0].values(), strict=True):
        parameters, ranks, stage = question
        each = [bytes / (ranks if stage >= first else 1) for bytes, first in ((2, 3), (2, 2), (12, 1))]
        name = f"model_states({parameters}, {ranks}, {stage})"
        expect_close(0, name, states, parameters * np.array(each), 1e-12)
        if abs(size - 80e9 / sum(each)) > 1:
            raise Wrong(f"largest_model(80e9, {ranks}, {stage}) is {size}, expected {int(80e9 / sum(each))}")


def judge_sharded(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial numbers, from slices, for the bytes of an all-reduce; in stage 2 no gradient stays."""
    given, ranks = case.given[0], case.ranks
    expected, (steps, backwards) = serial(given), given["inputs"].shape[:2]
    for rank, result in enumerate(results):
        sizes = [len(np.array_split(np.empty(size), ranks)[rank]) for size in SIZES]
        expect(f"rank {rank}", "elements of its slices:", result["slices"], sizes)
        expect(f"rank {rank}", "numbers in the optimizer's state:", result["state"], 2 * sum(sizes))
        expect(f"rank {rank}", "steps that AdamW has counted:", np.unique(result["steps"]), [float(steps)])
        if given["stage"] == 2:
            expect(f"rank {rank}", "most earlier gradients held when one came:", result["held"].max(), 0)
        gradient = flat(whole.tensor_split(ranks)[rank] for whole in expected["gradient"])
        expect_close(rank, "the slices' first gradients, one after the other,", result["gradient"], gradient)
        expect_close(rank, "the parameters after the last step", result["parameters"], expected["parameters"])
        expect_equal(rank, "compared with rank 0, parameters", result["parameters"], results[0]["parameters"])
    if given["counted"]:
        sent = np.sum([result["bytes"] for result in results])
        expect("all ranks", "bytes sent:", sent, steps * (backwards + 1) * (ranks - 1) * sum(SIZES) * ITEM)


def judge_clipped(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """One factor for all, from one norm over all ranks, for one number sent."""
    norm = np.linalg.norm(np.concatenate([given["gradient"] for given in case.given]))
    factor = min(1.0, float(case.given[0]["limit"]) / (norm + 1e-6)) if np.isfinite(norm) else 1.0
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        if np.isfinite(norm):
            expect_close(rank, "the norm", result["norm"], norm)
            expect_close(rank, "the gradient", result["gradient"], factor * given["gradient"])
        else:
            expect_equal(rank, "the norm", result["norm"], norm)
            expect_equal(rank, "the gradient", result["gradient"], given["gradient"])
        sent = [note.bytes for note in sent_by(rank, notes)]
        if max(sent, default=0) > ITEM or len(sent) > 2 * case.ranks:
            raise Wrong(
                f"rank {rank} sent messages of {sent} bytes, expected one all-reduce of one number ({ITEM} bytes)"
            )


ASKED = ((7_500_000_000, 64, 0), (7_500_000_000, 64, 1), (7_500_000_000, 64, 2), (7_500_000_000, 64, 3), (1000, 1, 2))
CHECKS = [
    Check(EQUATION, "four stages", 10, questions(*ASKED), equation, judge_equation),
    Check(STATE, "trains as one rank would", 16, batches(2, 4, stage=1), sharded, judge_sharded),
    Check(STATE, "slices of unequal length", 10, batches(3, stage=1), sharded, judge_sharded),
    Check(STATE, "the same under mpirun", 3, batches(2, stage=1, counted=False), sharded, judge_sharded, wire="mpi"),
    Check(GRADIENTS, "trains as one rank would", 14, batches(2, 3, stage=2), sharded, judge_sharded),
    Check(GRADIENTS, "adds up several backwards", 8, batches(2, stage=2, backwards=2), sharded, judge_sharded),
    Check(GRADIENTS, "under mpirun", 3, batches(2, stage=2, counted=False), sharded, judge_sharded, wire="mpi"),
    Check(CLIP, "scales what is too long", 8, slices(2, 3, limit=0.5), clipped, judge_clipped),
    Check(CLIP, "leaves the rest alone", 3, slices(3, limit=1e6), clipped, judge_clipped),
    Check(CLIP, "an infinite gradient", 3, slices(2, limit=1.0, broken=True), clipped, judge_clipped),
    Check(CLIP, "the same under mpirun", 2, slices(2, limit=0.5), clipped, judge_clipped, wire="mpi"),
]

# ---- hidden: the handout ends here ----

LARGE = ((175e9, 384, 1), (13e9, 7, 2), (1e12, 1000, 3))
CHECKS += [
    Check(EQUATION, "other models", 5, questions(*LARGE), equation, judge_equation, hidden=True),
    Check(STATE, "more ranks than elements of a bias", 6, batches(7, stage=1), sharded, judge_sharded, hidden=True),
    Check(GRADIENTS, "other sizes", 5, batches(5, stage=2, steps=4, backwards=3), sharded, judge_sharded, hidden=True),
    Check(CLIP, "other slices", 4, slices(5, limit=2.5), clipped, judge_clipped, hidden=True),
]
