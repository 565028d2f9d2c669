"""Lesson 09, task 5: a stage that notes what is done with it, the program that runs it, and the
judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import numpy as np
import torch
from judges import bare, unpacked
from torch import Tensor, nn

from minidist import Communicator, Trace
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, sent_by

ROWS, WIDTH, LAYERS = 2, 4, 2  # of a microbatch, of a stage
MESSAGE = ROWS * WIDTH * 8  # bytes


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
    """Linear layers with tanh behind them, which note what is done with them. `given` is there
    whatever happens.
    """

    def __init__(self, weights: Array, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight, layer.bias = (
                nn.Parameter(torch.tensor(weight)),
                nn.Parameter(torch.tensor(weight[0])),
            )
        self.events: list[tuple[int, int]] = []  # 0 forward, 1 backward, and the number of the call
        self.calls = self.held = self.peak = self.each = self.left = 0
        self.known = {
            tensor.untyped_storage().data_ptr() for tensor in (*given, *self.parameters())
        }
        # what was saved in each call
        self.memory: defaultdict[int, WeakSet[Any]] = defaultdict(WeakSet)

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
        """Note of how many microbatches something is there though their backward is done. The last
        one may linger.
        """
        done = [call for backward, call in self.events if backward][:-1]
        self.left = max(self.left, sum(bool(self.memory[call]) for call in done))


def run(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    comm.trace = trace = Trace()  # which shows a message that was sent when it has been waited for
    changed = watch_sends(comm)
    inputs, targets = (
        [torch.tensor(each) for each in given[name]] for name in ("inputs", "targets")
    )
    stage, words = Stage(given["weights"], inputs), bare(unpacked(given["words"]))
    loss = exercise.run_step(words, stage, nn.functional.mse_loss, inputs, targets, comm)
    gradients = [
        np.zeros(0) if p.grad is None else p.grad.numpy().reshape(-1) for p in stage.parameters()
    ]
    return {
        "loss": float(loss),
        "gradients": np.concatenate(gradients),
        "events": np.array(stage.events).reshape(-1, 2),
        "held": round(stage.peak / max(stage.each, 1), 3),
        "left": stage.left,
        "changed": np.array(changed, int).reshape(-1, 2),
        "ended": sum(event.kind in ("send", "exchange") for event in trace.events),
    }


def watch_sends(comm: Communicator) -> list[tuple[int, int]]:
    """Have `comm.isend` see whether a tensor is sent once more, changed, before its send has been
    waited for.

    Returns a list that grows: the tags of both sends.
    """
    isend, under_way, changed = comm.isend, list[Sent](), list[tuple[int, int]]()

    def watched(buffer: Tensor, to: int, tag: int = 0) -> Any:
        for other in under_way:
            if (
                other.tensor() is buffer
                and not other.ended()
                and not torch.equal(other.content, buffer)
            ):
                changed.append((other.tag, tag))
        request = isend(buffer, to, tag)
        under_way.append(Sent(ref(buffer), buffer.detach().clone(), tag, ref(request)))
        return request

    comm.isend = watched  # type: ignore[method-assign,assignment]
    return changed


class Sent(NamedTuple):
    """A tensor that was sent, if it is still there, with what was in it when it left; and the
    request.
    """

    tensor: Callable[[], Tensor | None]
    content: Tensor
    tag: int
    request: Callable[[], Any]

    def ended(self) -> bool:
        """Tell whether it has been waited for."""
        request = self.request()
        return request is not None and request.request is None


def judge_run(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The serial gradients; the words in their order; no more held than they ask for; two messages
    a microbatch.
    """
    losses, gradients = serial(case)
    words = [bare(unpacked(given["words"])) for given in case.given]
    orders = [[int(word[1:]) for word in words[rank] if word[0] == "F"] for rank in (0, -1)]
    mixed = serial(case, [orders[1][orders[0].index(m)] for m in range(len(losses))])
    by_order = serial(case, [orders[1].index(m) for m in range(len(losses))])
    slips = wrong_flows(case)
    for rank, result in enumerate(results):
        expect_words(rank, words[rank], result)
        if len(result["changed"]):
            before, after = result["changed"][0].tolist()
            raise Wrong(
                f"rank {rank} writes what it sends with tag {after} into the tensor that it sends "
                f"with tag {before}, and has not waited for: the other rank may not have read it "
                "yet, so each needs a tensor of its own"
            )
        expect_close(
            rank,
            "the gradients, one parameter after the other,",
            result["gradients"],
            gradients[rank],
            instead={
                "messages are taken in the order in which they come, not by their tags": mixed[1][
                    rank
                ],
                "each loss is divided by the number of microbatches once more": gradients[rank]
                / len(losses),
                "each stage divides the gradient that comes by the number of microbatches: the loss is "
                "divided already": gradients[rank] / len(losses) ** (case.ranks - 1 - rank),
                "losses are not divided by the number of microbatches": gradients[rank]
                * len(losses),
                "losses are divided by the number of ranks": gradients[rank] / case.ranks,
                "the targets are taken in the order of the forwards, not by their number": by_order[
                    1
                ][rank],
                **{story: wrong[rank] for story, wrong in slips.items()},
            },
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
                raise Wrong(
                    f"rank {rank} sent {what} to rank {other}, expected {messages} of {MESSAGE} "
                    "bytes"
                )
        if (under_way := len(sent_by(rank, notes)) - int(result["ended"])) > 0:
            raise Wrong(
                f"rank {rank} returned while it had not waited for {under_way} of its sends: what "
                "they still read may be overwritten by then"
            )


def serial(case: Case, order: Sequence[int] | None = None) -> tuple[list[float], list[Array]]:
    """Return the microbatches' losses and the gradients of each rank's stage, from autograd on the
    whole model.

    With `order`, microbatch m is held against target order[m].
    """
    stages = [Stage(given["weights"]) for given in case.given]
    x, targets = torch.tensor(case.given[0]["inputs"]), torch.tensor(case.given[-1]["targets"])
    targets = targets if order is None else targets[list(order)]
    for stage in stages:
        x = stage(x)
    losses = (x - targets).square().mean((1, 2))
    losses.mean().backward()
    gradients = [
        torch.cat([p.grad.view(-1) for p in stage.parameters()]).numpy() for stage in stages
    ]
    return losses.tolist(), gradients


def wrong_flows(case: Case) -> dict[str, list[Array]]:
    """Return the gradients of each rank's stage if another gradient flows back than that of its
    output.
    """
    found = dict[str, list[Array]]()
    for story in ("ones", "passed on", "first", "last"):
        stages, x = (
            [Stage(given["weights"]) for given in case.given],
            torch.tensor(case.given[0]["inputs"]),
        )
        targets, ends = torch.tensor(case.given[-1]["targets"]), list[tuple[Tensor, Tensor]]()
        for stage in stages:
            x = x.detach().requires_grad_()
            ends.append((x, stage(x)))
            x = ends[-1][1]
        losses = (x - targets).square().mean((1, 2))
        losses = (
            losses
            if story in ("ones", "passed on")
            else losses[:1]
            if story == "first"
            else losses[-1:]
        )
        (losses.sum() / len(targets)).backward()
        gradient = ends[-1][0].grad
        for x, output in ends[-2::-1]:
            assert gradient is not None
            output.backward(torch.ones_like(output) if story == "ones" else gradient)
            gradient = gradient if story == "passed on" else x.grad
        gradients = [[p.grad for p in stage.parameters()] for stage in stages]
        found[story] = [
            torch.cat([g.view(-1) for g in some if g is not None]).numpy() for some in gradients
        ]
    return {
        "backward begins with ones, not with the gradient that has come": found["ones"],
        "a rank sends on the gradient of its output, as it came, not that of its input": found[
            "passed on"
        ],
        "only the first microbatch counts": found["first"],
        "only the last microbatch counts": found["last"],
    }


def expect_words(rank: int, words: Sequence[str], result: Arrays) -> None:
    """Raise `Wrong` unless the stage was called and run backward in the order of the words, holding
    what they imply.
    """
    forwards = [word[1:] for word in words if word[0] == "F"] + ["?"] * len(result["events"])
    found = " ".join(
        "FB"[backward] + forwards[call] for backward, call in result["events"].tolist()
    )
    if found != " ".join(words):
        raise Wrong(f"rank {rank} did {found}, expected {' '.join(words)}")
    held = max(np.cumsum([1 if word[0] == "F" else -1 for word in words]))
    if result["held"] > held:
        raise Wrong(
            f"rank {rank} kept what autograd saves of {result['held']:g} microbatches at once, "
            f"expected {held}"
        )
    if int(result["left"]) > 1:  # a variable may still name the last but one's
        raise Wrong(
            f"rank {rank} still had inputs or outputs of {int(result['left'])} microbatches whose "
            "B was done: let both go in B, when the output has long been received"
        )
