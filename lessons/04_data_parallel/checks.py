"""Lesson 04: what is checked, and for how many points. In float64, ranks differ from a serial run by rounding only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist import Communicator
from minidist.collectives import all_reduce
from minidist.grade.contract import Arrays, Case, Check, Draw, Note, Task, Wrong, expect_close, expect_equal, sent_by

BY_HAND = ("minidist.parallel", "minidist.trainer", "torch.nn.parallel")
TITLES = ("a part of the loss", "naive data parallelism", "buckets", "accumulation")
PART, NAIVE, BUCKETS, ACCUMULATE = (Task(number, title, BY_HAND) for number, title in enumerate(TITLES, start=1))
SHAPES = ((4, 3), (4,), (4, 3), (4,), (2, 4), (2,))  # of weights and biases
BYTES = tuple(8 * int(np.prod(shape)) for shape in SHAPES)
OPTIONS = {"steps": 2, "unequal": 0, "limit": 80, "microbatches": 1, "reordered": 0, "quiet": 0, "failing": 0}


class Towers(nn.Module):
    """Two layers side by side and one behind. Of the two, the one that runs first gets its gradient last."""

    def __init__(self, given: Arrays, rank: int = 0) -> None:
        super().__init__()
        pieces = torch.tensor(given["parameters"]).split([size // 8 for size in BYTES])
        self.values = nn.ParameterList(piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True))
        self.order = (2, 0) if given["reordered"] and rank % 2 else (0, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = (functional.linear(inputs, self.values[at], self.values[at + 1]).tanh() for at in self.order)
        return functional.linear(first * second, self.values[4], self.values[5])


def batches(*shapes: tuple[int, int], **options: int) -> Draw:
    """Draw one case for each (ranks, rows): a batch for each step, and parameters, equal on all ranks or not."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases, chosen = [], OPTIONS | options
        for ranks, rows in shapes:
            arrays = {name: np.array(value) for name, value in chosen.items()}
            arrays |= {name: rng.normal(size=(chosen["steps"], rows, n)) for name, n in (("inputs", 3), ("targets", 2))}
            own = rng.normal(size=(ranks, sum(BYTES) // 8))
            given = tuple(arrays | {"parameters": own[rank * chosen["unequal"]]} for rank in range(ranks))
            said = "".join(f", {name} {value}" for name, value in options.items())
            cases.append(Case(given, f"ranks {ranks}, rows {rows}{said}"))
        return cases

    return draw


def limits(*bytes: int) -> Draw:
    """Draw one case for each limit of a bucket."""
    return lambda rng: [case for limit in bytes for case in batches((1, 1), limit=limit)(rng)]


def steps_of(given: Arrays) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of each step."""
    return list(zip(torch.tensor(given["inputs"]), torch.tensor(given["targets"]), strict=True))


def part_of_loss(model: nn.Module, inputs: Tensor, targets: Tensor, rank: int = 0, ranks: int = 1) -> Tensor:
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
    return torch.cat([torch.full((1,), torch.nan) if t is None else t.detach().flatten() for t in tensors]).numpy()


def part(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and see which rows the model is called with."""
    model, seen = Towers(given), list[Tensor]()
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach().clone()))
    loss = exercise.local_loss(model, *steps_of(given)[0], comm)
    loss.backward()
    rows, gradient = torch.cat(seen).numpy(), flat(p.grad for p in model.parameters())
    return {"loss": loss.item(), "gradient": gradient, "rows": rows}


def naive(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 in a loop."""
    model = Towers(given)
    exercise.start_equal(model, comm)
    results: dict[str, Any] = {"start": flat(model.parameters()), "broadcasting": comm.traffic.messages_sent}
    for inputs, targets in steps_of(given):
        part_of_loss(model, inputs, targets, comm.rank, comm.size).backward()
        exercise.sum_gradients(model, comm)
        results.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    return results | {"parameters": flat(model.parameters())}


def assign(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the first half of task 3."""
    model = Towers(given)
    found = exercise.assign_buckets(list(model.parameters()), int(given["limit"]))
    bucket = {id(parameter): number for number, some in enumerate(found) for parameter in some}
    return {"buckets": [bucket.get(id(parameter), -1) for parameter in model.parameters()]}


def bucketed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the second half of task 3 in a loop; note how many gradients had come at each launch, and at each wait."""
    model, stream, results = Towers(given, comm.rank), comm.stream(), dict[str, Any]()
    arrivals, launches, waits = list[int](), list[int](), list[int]()

    def launch(work: Any, *arguments: Any) -> Any:
        launches.append(len(arrivals))
        handle = stream.launch(work, *arguments)
        return SimpleNamespace(wait=lambda: waits.append(len(arrivals)) or handle.wait())

    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: arrivals.append(number) if gradients.synchronising else None
        )
    observed = SimpleNamespace(launch=launch, comm=stream.comm)
    gradients = exercise.BucketedGradients(model, comm, observed, int(given["limit"]))
    before = comm.traffic.messages_sent
    for inputs, targets in steps_of(given):
        for synchronising in [False, True] if given["quiet"] else [True]:  # quiet: first only add up
            gradients.synchronising = synchronising
            part_of_loss(model, inputs, targets, comm.rank, comm.size).backward()
        gradients.finish()
        results.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    results |= {"launches": launches, "waits": waits, "messages": comm.traffic.messages_sent - before}
    return results | {"parameters": flat(model.parameters()), "arrivals": arrivals}


def accumulated(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 with gradients that are summed as they come; with `failing`, the model raises in its second call."""
    model, arrivals, calls, seen, ends = Towers(given), list[int](), list[int](), list[Tensor](), list[int]()
    gradients = SimpleNamespace(synchronising=True, finish=lambda: ends.append(len(arrivals)))

    def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        calls.append(len(arrivals))
        seen.append(arguments[0].detach().clone())
        if given["failing"] and len(seen) == 2:
            raise ArithmeticError("the second microbatch does not fit, say")

    def arrived(parameter: Any) -> None:
        arrivals.append(1)
        if gradients.synchronising:
            all_reduce(parameter.grad, comm, algorithm="ring")

    model.register_forward_pre_hook(look)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    try:
        exercise.accumulate(model, gradients, *steps_of(given)[0], int(given["microbatches"]), comm)
    except ArithmeticError:
        return {"synchronising": gradients.synchronising}
    results = {"gradient": flat(p.grad for p in model.parameters()), "rows": torch.cat(seen).numpy()}
    return results | {"calls": calls, "ends": ends, "synchronising": gradients.synchronising}


def serial(given: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Return the first gradient and the last parameters of a run on one rank."""
    model, found = Towers(given), dict[str, np.ndarray[Any, Any]]()
    for inputs, targets in steps_of(given):
        for _ in range(1 + int(given["quiet"])):
            part_of_loss(model, inputs, targets).backward()
        found.setdefault("gradient", flat(p.grad for p in model.parameters()))
        descend(model)
    return found | {"parameters": flat(model.parameters())}


def expect(rank: int, what: str, found: Any, expected: object) -> None:
    """Raise `Wrong` unless counts, or lists of them, are equal."""
    if found.tolist() != expected:
        raise Wrong(f"rank {rank}: {what} {found.tolist()}, expected {expected}")


def judge_part(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Losses and gradients add up, from one call each on the right rows."""
    inputs, targets = steps_of(case.given[0])[0]
    for rank, result in enumerate(results):
        expect_equal(rank, "the rows it computed on", result["rows"], inputs.tensor_split(case.ranks)[rank].numpy())
    loss = part_of_loss(Towers(case.given[0]), inputs, targets).detach().numpy()
    expect_close(0, "the sum of all ranks' losses", np.sum([result["loss"] for result in results], axis=0), loss)
    gradient = np.sum([result["gradient"] for result in results], axis=0)
    expect_close(0, "the sum of all ranks' gradients", gradient, serial(case.given[0])["gradient"])
    expect(0, "messages sent, by all ranks:", np.array(len([note for note in notes if note.kind == "send"])), 0)


def judge_trained(case: Case, results: Sequence[Arrays]) -> None:
    """All ranks have the serial gradients and parameters, to the same bit."""
    expected = serial(case.given[0])
    for rank, result in enumerate(results):
        expect_close(rank, "the gradient of the first step", result["gradient"], expected["gradient"])
        expect_close(rank, "the parameters after the last step", result["parameters"], expected["parameters"])
        expect_equal(rank, "compared with rank 0, parameters", result["parameters"], results[0]["parameters"])


def judge_naive(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks train as one; a broadcast and, in each step, an all-reduce a parameter."""
    for rank, result in enumerate(results):
        expect_equal(rank, "the parameters at the start", result["start"], case.given[0]["parameters"])
        sent = len(sent_by(rank, notes)) - result["broadcasting"]
        expect(rank, "messages of sum_gradients:", sent, 2 * (case.ranks - 1) * 6 * len(case.given[0]["inputs"]))
    sent = np.sum([result["broadcasting"] for result in results])
    expect(0, "messages of start_equal, of all ranks:", sent, 6 * (case.ranks - 1))
    judge_trained(case, results)


def buckets_of(limit: int) -> list[int]:
    """Return the number of each parameter's bucket."""
    numbers, number, held = list[int](), 0, 0
    for size in reversed(BYTES):
        if held >= limit:
            number, held = number + 1, 0
        numbers.append(number)
        held += size
    return numbers[::-1]


def judge_assign(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each parameter is in its bucket."""
    for rank, result in enumerate(results):
        expect(rank, f"parameters of {BYTES} bytes are in", result["buckets"], buckets_of(int(case.given[0]["limit"])))


def judge_bucketed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks train as one; each bucket was launched when it was complete, and waited for when all were."""
    steps, bucket = len(case.given[0]["inputs"]), buckets_of(int(case.given[0]["limit"]))
    for rank, result in enumerate(results):
        launches = []
        for arrivals in result["arrivals"].reshape(steps, 6).tolist():
            late = [max(at for at, p in enumerate(arrivals) if bucket[p] <= number) for number in range(bucket[0] + 1)]
            launches += [len(launches) // len(late) * 6 + 1 + at for at in late]
        if len(result["launches"]) != len(launches):
            raise Wrong(
                f"rank {rank}: {len(result['launches'])} buckets were launched in {steps} steps, expected "
                f"{len(launches)}: does every step launch each bucket once, and `finish` prepare for the next?"
            )
        expect(rank, "bucket by bucket, gradients that had come when it was launched:", result["launches"], launches)
        expect(rank, "messages sent:", result["messages"], 2 * (case.ranks - 1) * len(launches))
        waits = np.repeat(6 * np.arange(1, steps + 1), bucket[0] + 1).tolist()
        expect(rank, "bucket by bucket, gradients that had come when it was waited for:", result["waits"], waits)
    judge_trained(case, results)


def judge_accumulated(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The gradient is the serial one, from forward and backward in turns, of which the last communicates."""
    given, parts = case.given[0], int(case.given[0]["microbatches"])
    for rank, result in enumerate(results):
        expect(rank, "synchronising at the end:", result["synchronising"], True)
        if given["failing"]:
            continue
        rows = torch.tensor(given["inputs"][0]).tensor_split(case.ranks)[rank].numpy()
        expect_equal(rank, "the rows it computed on", result["rows"], rows)
        expect(rank, "gradients there at each call of the model:", result["calls"], [6 * n for n in range(parts)])
        expect(rank, "gradients there at each finish():", result["ends"], [6 * parts])
        expect(rank, "messages sent:", np.array(len(sent_by(rank, notes))), 2 * (case.ranks - 1) * 6)
        expect_close(rank, "the gradient", result["gradient"], serial(given)["gradient"])


CHECKS = [
    Check(PART, "parts add up", 8, batches((2, 6), (3, 7)), part, judge_part),
    Check(PART, "fewer rows than ranks", 3, batches((4, 2)), part, judge_part),
    Check(PART, "the same under mpirun", 2, batches((2, 5)), part, judge_part, wire="mpi"),
    Check(NAIVE, "trains as one rank would", 11, batches((2, 6), (3, 7), unequal=1), naive, judge_naive),
    Check(NAIVE, "the same under mpirun", 3, batches((2, 5), unequal=1), naive, judge_naive, wire="mpi"),
    Check(BUCKETS, "deals parameters out", 5, limits(80, 96), assign, judge_assign),
    Check(BUCKETS, "one for each, one for all", 3, limits(1, 9999), assign, judge_assign),
    Check(BUCKETS, "launches complete buckets", 12, batches((2, 6), (3, 7)), bucketed, judge_bucketed),
    Check(BUCKETS, "ranks of different orders", 6, batches((2, 6), reordered=1), bucketed, judge_bucketed),
    Check(BUCKETS, "rests between", 4, batches((2, 6), quiet=1), bucketed, judge_bucketed),
    Check(BUCKETS, "the same under mpirun", 3, batches((2, 6)), bucketed, judge_bucketed, wire="mpi"),
    Check(ACCUMULATE, "communicates once", 9, batches((2, 9), (3, 7), microbatches=2), accumulated, judge_accumulated),
    Check(ACCUMULATE, "parts without rows", 3, batches((2, 3), microbatches=3), accumulated, judge_accumulated),
    Check(ACCUMULATE, "an error", 3, batches((2, 6), microbatches=3, failing=1), accumulated, judge_accumulated),
    Check(ACCUMULATE, "under mpirun", 3, batches((2, 6), microbatches=2), accumulated, judge_accumulated, wire="mpi"),
]

# ---- hidden: the handout ends here ----

CHECKS += [
    Check(PART, "other sizes", 3, batches((4, 5), (5, 12)), part, judge_part, hidden=True),
    Check(NAIVE, "other sizes", 5, batches((4, 9), unequal=1, steps=3), naive, judge_naive, hidden=True),
    Check(BUCKETS, "other limits", 3, limits(33, 130, 161), assign, judge_assign, hidden=True),
    Check(BUCKETS, "other sizes", 4, batches((4, 3), steps=3, limit=1), bucketed, judge_bucketed, hidden=True),
    Check(BUCKETS, "all at once", 3, batches((3, 5), reordered=1, quiet=1), bucketed, judge_bucketed, hidden=True),
    Check(ACCUMULATE, "other sizes", 4, batches((3, 14), microbatches=4), accumulated, judge_accumulated, hidden=True),
]
