"""Lesson 09: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from minidist import Communicator, Trace
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, expect_close, sent_by
from minidist.parallel.pipeline import Plan, ScheduleError, check, peak_activations, read_plan, simulate

ROWS, WIDTH, LAYERS = 2, 4, 2  # of a microbatch, of a stage
MESSAGE = ROWS * WIDTH * 8  # bytes


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


class Mark(torch.autograd.Function):
    """Nothing; its backward notes that the backward of a call of the stage has begun."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stage: Stage, call: int) -> Tensor:
        ctx.stage, ctx.call = stage, call
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.stage.look()
        ctx.stage.events.append((1, ctx.call))
        return gradient, None, None


class Saved:
    """A tensor that autograd keeps; counted as long as it does."""

    def __init__(self, tensor: Tensor, stage: Stage) -> None:
        self.tensor, self.stage = tensor, stage
        stage.held += tensor.nbytes
        stage.peak = max(stage.peak, stage.held)

    def __del__(self) -> None:
        self.stage.held -= self.tensor.nbytes


class Stage(nn.Module):
    """Linear layers with tanh behind them, which note what is done with them. `given` is there whatever happens."""

    def __init__(self, weights: Array, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight, layer.bias = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.tensor(weight[0]))
        self.events: list[tuple[int, int]] = []  # 0 forward, 1 backward, and the number of the call
        self.calls = self.held = self.peak = self.each = self.left = 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in (*given, *self.parameters())}
        self.memory: defaultdict[int, WeakSet[Any]] = defaultdict(WeakSet)  # what was saved in each call

    def forward(self, x: Tensor) -> Tensor:
        call, before = self.calls, self.held
        self.look()
        self.calls += 1
        self.events.append((0, call))

        def pack(tensor: Tensor) -> Saved:
            if (storage := tensor.untyped_storage()).data_ptr() not in self.known:
                self.memory[call].add(storage)
            return Saved(tensor, self)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        self.each = max(self.each, self.held - before)
        return Mark.apply(x, self, call)

    def look(self) -> None:
        """Note of how many microbatches something is there though their backward is done. The last one may linger."""
        done = [call for backward, call in self.events if backward][:-1]
        self.left = max(self.left, sum(bool(self.memory[call]) for call in done))


def run(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    comm.trace = trace = Trace()  # which shows a message that was sent when it has been waited for
    inputs, targets = ([torch.tensor(each) for each in given[name]] for name in ("inputs", "targets"))
    stage, words = Stage(given["weights"], inputs), bare(unpacked(given["words"]))
    loss = exercise.run_step(words, stage, nn.functional.mse_loss, inputs, targets, comm)
    gradients = [np.zeros(0) if p.grad is None else p.grad.numpy().reshape(-1) for p in stage.parameters()]
    return {
        "loss": float(loss),
        "gradients": np.concatenate(gradients),
        "events": np.array(stage.events).reshape(-1, 2),
        "held": round(stage.peak / max(stage.each, 1), 3),
        "left": stage.left,
        "ended": sum(event.kind in ("send", "exchange") for event in trace.events),
    }


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


def judge_run(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial gradients; the words in their order; no more held than they ask for; two messages a microbatch."""
    losses, gradients = serial(case)
    words = [bare(unpacked(given["words"])) for given in case.given]
    orders = [[int(word[1:]) for word in words[rank] if word[0] == "F"] for rank in (0, -1)]
    mixed = serial(case, [orders[1][orders[0].index(m)] for m in range(len(losses))])
    for rank, result in enumerate(results):
        expect_words(rank, words[rank], result)
        expect_close(
            rank,
            "the gradients, one parameter after the other,",
            result["gradients"],
            gradients[rank],
            instead={"messages are taken in the order in which they come, not by their tags": mixed[1][rank]},
        )
        expect_close(
            rank,
            "the returned loss",
            result["loss"],
            np.array(np.mean(losses) if rank == case.ranks - 1 else 0.0),
            instead={
                "only the last microbatch's is returned": np.array(losses[orders[1][-1]]),
                "the microbatches' are added up, and not divided": np.array(sum(losses)),
            },
        )
        for other in range(case.ranks):
            found = [note.bytes for note in sent_by(rank, notes) if note.to == other]
            messages = len(case.given[0]["inputs"]) if abs(other - rank) == 1 else 0
            if found != [MESSAGE] * messages:
                what = f"{len(found)} messages, {sum(found)} bytes in all,"
                raise Wrong(f"rank {rank} sent {what} to rank {other}, expected {messages} of {MESSAGE} bytes")
        if (under_way := len(sent_by(rank, notes)) - int(result["ended"])) > 0:
            raise Wrong(
                f"rank {rank} returned while it had not waited for {under_way} of its sends: what they still read may "
                "be overwritten by then"
            )


def serial(case: Case, order: Sequence[int] | None = None) -> tuple[list[float], list[Array]]:
    """Return the microbatches' losses and the gradients of each rank's stage, from autograd on the whole model.

    With `order`, microbatch m is held against target order[m].
    """
    stages = [Stage(given["weights"]) for given in case.given]
    x, targets = torch.tensor(case.given[0]["inputs"]), torch.tensor(case.given[-1]["targets"])
    targets = targets if order is None else targets[list(order)]
    for stage in stages:
        x = stage(x)
    losses = (x - targets).square().mean((1, 2))
    losses.mean().backward()
    gradients = [torch.cat([p.grad.view(-1) for p in stage.parameters()]).numpy() for stage in stages]
    return losses.tolist(), gradients


def expect_words(rank: int, words: Sequence[str], result: Arrays) -> None:
    """Raise `Wrong` unless the stage was called and run backward in the order of the words, holding what they imply."""
    forwards = [word[1:] for word in words if word[0] == "F"] + ["?"] * len(result["events"])
    found = " ".join("FB"[backward] + forwards[call] for backward, call in result["events"].tolist())
    if found != " ".join(words):
        raise Wrong(f"rank {rank} did {found}, expected {' '.join(words)}")
    held = max(np.cumsum([1 if word[0] == "F" else -1 for word in words]))
    if result["held"] > held:
        raise Wrong(f"rank {rank} kept what autograd saves of {result['held']:g} microbatches at once, expected {held}")
    if int(result["left"]) > 1:  # a variable may still name the last but one's
        raise Wrong(
            f"rank {rank} still had inputs or outputs of {int(result['left'])} microbatches whose B was done: let both "
            "go in B, when the output has long been received"
        )
