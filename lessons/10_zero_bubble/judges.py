"""Lesson 10: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, expect_close, sent_by
from minidist.parallel.pipeline import (
    Plan,
    ScheduleError,
    check,
    peak_activations,
    plan,
    read_plan,
    simulate,
    with_communication,
)
from minidist.parallel.pipeline.executor import Pipeline

ROWS, WIDTH = 2, 4  # of a microbatch
MESSAGE = ROWS * WIDTH * 8  # bytes


def label_of(ranks: int, microbatches: int, chunks: int) -> str:
    return f"{ranks} ranks, {microbatches} microbatches" + f", {chunks} chunks" * (chunks > 1)


def place(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1 for every rank."""
    ranks, microbatches, chunks = given["sizes"].tolist()
    return {
        "stages": [exercise.stages_of(rank, ranks, chunks) for rank in range(ranks)],
        "warm-up": [exercise.warm_up(rank, ranks, microbatches, chunks) for rank in range(ranks)],
    }


def all_interleaved(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 for every rank."""
    ranks, microbatches, chunks = given["sizes"].tolist()
    return {"schedule": packed([exercise.interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)])}


def all_zb_h1(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 for every rank."""
    ranks, microbatches, _ = given["sizes"].tolist()
    return {"schedule": packed([exercise.zb_h1(rank, ranks, microbatches) for rank in range(ranks)])}


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
        own = {stage: stage_of(given["weights"][stage]) for stage in schedule.stages_of(comm.rank)}
        pipeline = Pipeline(own, comm, schedule, loss_of(given), torch.empty_like)
        pipeline.step(*([torch.tensor(each) for each in given[name]] for name in ("inputs", "targets")))
        return {**answer, **{f"gradient {number}": gradient_of(stage) for number, stage in own.items()}}

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

    names = ("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "addmm", "addmm_", "einsum", "tensordot", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("grad", "backward"):
            raise Wrong("autograd is called, but is not allowed here: compute the gradients with matrix products")
        self.count += name in self.names
        return function(*args, **(kwargs or {}))


def split(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run both halves of task 3, counting their work and what is kept between them."""
    weights = [torch.tensor(value) for name, value in given.items() if name.startswith("weight")]
    activations = [torch.tensor(given["x"])]
    for weight in weights:
        activations.append(torch.tanh(activations[-1] @ weight.T))
    seed = torch.tensor(given["gradient"])
    handed, before = (*weights, *activations, seed), [each.clone() for each in (*weights, *activations, seed)]
    with torch.inference_mode(), Products() as first:  # in which autograd remembers nothing
        gradient, pairs = exercise.backward_for_inputs(weights, activations, seed)
    kept = sum(each.nbytes for pair in pairs for each in pair)
    with torch.inference_mode(), Products() as second:
        gradients = exercise.backward_for_weights(pairs)
    found = {f"weight {number}": each.detach().numpy() for number, each in enumerate(gradients)}
    changed = [not torch.equal(was, now) for was, now in zip(before, handed, strict=True)]
    work = [first.count, second.count]
    return {**found, "x": gradient.detach().numpy(), "kept": kept, "work": work, "changed": changed}


def judge_place(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The formulas of the lesson."""
    p, m, v = case.given[0]["sizes"].tolist()
    for rank in range(p):
        stages, forwards = results[0]["stages"][rank].tolist(), int(results[0]["warm-up"][rank])
        if stages != [chunk * p + rank for chunk in range(v)]:
            raise Wrong(f"rank {rank} of {p} has stages {stages}, expected {[c * p + rank for c in range(v)]}")
        ahead, back = (v - 1) * p, p - rank - 1
        expected = min(ahead + 2 * back, m * v)
        instead = {
            f"more than the {m * v} that it has": ahead + 2 * back if ahead + 2 * back > m * v else -1,
            "the last of these is the forward of the first turn": expected + 1,
            "the way of the gradient back to this rank is not counted": min(ahead + back, m * v),
            f"the rank has {v} times {m} forwards, not {m}": min(ahead + 2 * back, m),
        }
        if forwards != expected:
            hint = next((f": {story}" for story, value in instead.items() if forwards == value), "")
            raise Wrong(f"rank {rank} of {p} warms up with {forwards} forwards, expected {expected}{hint}")


def expect_schedule(case: Case, results: Sequence[Arrays]) -> Plan:
    """Return the answer's schedule; raise `Wrong` unless it can be run, with the placement and the sizes asked for."""
    p, m, v = case.given[0]["sizes"].tolist()
    try:
        schedule = unpacked(results[0]["schedule"])
        check(schedule)
    except ScheduleError as error:
        raise Wrong(str(error)) from None
    if schedule.rank_of != tuple(range(p)) * v or schedule.microbatches != m:
        raise Wrong(
            f"there are {schedule.microbatches} microbatches and the stages are on ranks {list(schedule.rank_of)}, "
            f"expected {m} and {list(range(p)) * v}"
        )
    return schedule


def judge_interleaved(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """The bubble is (p - 1)/(v m + p - 1), messages are hidden and no more is held than in Megatron-LM's order."""
    schedule, (p, m, v) = expect_schedule(case, results), case.given[0]["sizes"].tolist()
    for rank, row in enumerate(schedule.actions):
        stages = range(rank, p * v, p)
        for kind, order in (("F", stages), ("B", stages[::-1])):
            expected = [f"{s}{kind}{k}" for first in range(0, m, p) for s in order for k in range(first, first + p)]
            if (found := [str(action) for action in row if action.kind == kind]) != expected:
                orders = (" ".join(each[: 2 * p + 1]) for each in (found, expected))
                raise Wrong(f"rank {rank} does its {kind} in the order {' ..., expected '.join(orders)} ...")
    for forward, backward in ((1, 2), (0.7, 1.9)):
        found, expected = simulate(schedule, forward, backward).bubble, (p - 1) / (v * m + p - 1)
        if found > expected + 1e-9:
            costs = f"F takes {forward:g}, B {backward:g}"
            raise Wrong(f"the bubble is {found:.1%} of the step ({costs}), expected {expected:.1%}")
    reference = plan("interleaved", p, m, v)
    held = zip(peak_activations(schedule), peak_activations(reference), strict=True)
    for rank, (found, most) in enumerate(held):
        if found > most:
            raise Wrong(f"rank {rank} holds up to {found} microbatches of one stage, expected at most {most}")
    found, most = (simulate(each, 1, 2, latency=0.1).length for each in (schedule, reference))
    if found > most + 1e-9:
        raise Wrong(f"F takes 1, B 2 and a message 0.1: the step takes {found:g}, expected {most:g}: warm up longer")
    return {"bubble of interleaved": simulate(schedule, 1, 2).bubble}


def judge_zb_h1(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """Each rank idles (p - 1)(F + I - W) at most, and holds what the first rank of 1F1B holds."""
    schedule, p = expect_schedule(case, results), int(case.given[0]["sizes"][0])
    for rank, row in enumerate(schedule.actions):
        held = max(accumulate({"F": 1, "W": -1, "B": -1}.get(action.kind, 0) for action in row))
        if held > p:
            raise Wrong(f"rank {rank} holds {held} microbatches whose F is done and whose W is not, expected {p}")
        for kind in "FIW":
            order = [action.microbatch for action in row if action.kind == kind]
            if order != sorted(order):
                raise Wrong(f"rank {rank} takes the microbatches of its {kind} in the order {order}")
    for forward, input, weight in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.6)):
        most = (p - 1) * (forward + input - weight)
        idle = simulate(schedule, forward, input + weight, input, weight).idle
        rank = int(np.argmax(idle))
        if idle[rank] > most + 1e-9:
            costs = f"F takes {forward:g}, I {input:g}, W {weight:g}"
            raise Wrong(f"rank {rank} idles {idle[rank]:g} ({costs}), expected at most {most:g}")
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
            found, name = result.get(f"gradient {stage}", np.zeros(0)), f"the gradient of stage {stage}"
            expect_close(rank, name, found, gradient_of(stages[stage]))
    sent = [note for rank in range(p) for note in sent_by(rank, notes)]
    expected, found = 2 * m * (p * v - 1) * MESSAGE, sum(note.bytes for note in sent)
    if found != expected:
        raise Wrong(f"all ranks together sent {found} bytes, expected {expected}")


def judge_split(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Autograd's gradients; one product a layer in each half; what is kept between them."""
    given, result = case.given[0], results[0]
    x = torch.tensor(given["x"], requires_grad=True)
    names = [name for name in given if name.startswith("weight")]
    weights = {name: torch.tensor(given[name], requires_grad=True) for name in names}
    y, passed = x, [x]
    for weight in weights.values():
        y = torch.tanh(y @ weight.T)
        y.retain_grad()
        passed.append(y)
    y.backward(torch.tensor(given["gradient"]))
    if result["changed"].any():
        what = ("weights",) * len(names) + ("activations",) * len(passed) + ("gradient",)
        raise Wrong(f"backward_for_inputs changes the {what[int(result['changed'].argmax())]} that it is given")
    mistaken = known_mistakes(weights, passed)
    for name, leaf in {"x": x, **weights}.items():
        if name not in result:
            raise Wrong(f"backward_for_weights gave no gradient of {name}")
        assert leaf.grad is not None
        expect_close(0, f"the gradient of {name}", result[name], leaf.grad.numpy(), instead=mistaken.get(name))
    halves = zip(("backward_for_inputs", "backward_for_weights"), result["work"].tolist(), strict=True)
    for half, found in halves:
        if found != len(names):
            raise Wrong(f"{half} does {found} matrix products for {len(names)} layers, expected one for each")
    kept = sum(8 * len(given["x"]) * sum(weight.shape) for weight in weights.values())
    if result["kept"] != kept:
        raise Wrong(f"the pairs hold {result['kept']} bytes, expected {kept}: an input and a gradient for each layer")


def known_mistakes(weights: dict[str, Tensor], passed: Sequence[Tensor]) -> dict[str, dict[str, Array]]:
    """Return, by weight, what comes out if tanh's derivative is left out: of the pairs only, or everywhere."""
    found, flowing = {}, passed[-1].grad
    for number, (name, weight) in reversed(list(enumerate(weights.items()))):
        x, gradient = passed[number].detach(), passed[number + 1].grad
        assert gradient is not None and flowing is not None and weight.grad is not None
        found[name] = {
            "the pairs hold the gradient for tanh's result, not for what it was applied to": (gradient.T @ x).numpy(),
            "tanh's derivative is left out": (flowing.T @ x).numpy(),
            "x and the gradient change places": weight.grad.T.numpy(),
        }
        flowing = flowing @ weight.detach()
        found["x"] = {"tanh's derivative is left out": flowing.numpy()}
        other = list(weights.values())[len(weights) - 1 - number].grad
        if other is not None and other is not weight.grad:
            found[name]["the pairs stand from the last layer to the first"] = other.numpy()
    return found
