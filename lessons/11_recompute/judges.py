"""Lesson 11, tasks 2, 3 and 5: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import minidist
from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, sent_by
from minidist.parallel.adjoint import copy_to, reduce_from


class Part(nn.Module):
    """A function of x and some matrices that counts its calls, and knows which of its activations are alive."""

    def __init__(self, function: Callable[..., Tensor], *matrices: np.ndarray) -> None:
        super().__init__()
        self.function, self.calls = function, 0
        self.matrices = nn.ParameterList(torch.from_numpy(matrix.copy()) for matrix in matrices)
        self.made: list[tuple[StorageWeakRef, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        self.calls += 1
        return self.function(self.note, x, *self.matrices)

    def note(self, tensor: Tensor) -> Tensor:
        """Remember an activation without keeping it alive."""
        self.made.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        return tensor


def kept_by(y: Tensor) -> list[Tensor]:
    """Return the activations that an answer's own functions in the graph of `y` keep."""
    found: list[Tensor] = []
    nodes = [y.grad_fn]
    for node in nodes:
        values = [*getattr(node, "saved_tensors", ()), *getattr(node, "__dict__", {}).values()]
        for value in values:
            several = value if isinstance(value, list | tuple) else (value,)
            found += [each for each in several if isinstance(each, Tensor) and each.is_floating_point()]
        nodes += [after for after, _ in getattr(node, "next_functions", ()) if after not in nodes]
    return [tensor for tensor in found if not isinstance(tensor, nn.Parameter)]


def watch(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return for each part how often it was called, and the bytes of what it computed inside that are alive."""
    if any(not made.expired() for part in parts for made, _ in part.made):
        gc.collect()  # slow, and seldom needed
    return [(part.calls, sum(size for made, size in part.made if not made.expired())) for part in parts]


def residual(note: Any, x: Tensor, up: Tensor, down: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return x + down(dropout(tanh(up(x)))), with dropout if there is a generator to draw from. x is [B, D]."""
    inner = note(torch.tanh(note(x @ up.T)))
    if generator is not None:
        drawn = torch.rand(inner.shape, generator=generator, dtype=torch.float64)
        inner = note(inner * note((drawn < 0.5) * 2.0))
    return x + inner @ down


class Stored:
    """The answers without recomputing: what the numbers have to be."""

    def checkpoint(self, block: nn.Module, x: Tensor, *_: object) -> Tensor:
        """Call it."""
        return block(x)

    checkpoint_random = checkpoint

    def checkpoint_between(self, parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
        """Call one after the other."""
        for part, _ in parts:
            x = part(x)
        return x


def run_chain(
    exercise: Any, comm: Communicator, given: Arrays, needs: bool = True, frozen: bool = False, random: bool = False
) -> dict[str, Any]:
    """Run task 2 or 3 on one block after the other, forward and backward; note calls, bytes held, and draws."""
    generator = torch.Generator().manual_seed(int(given["seed"]))
    function = partial(residual, generator=generator if random else None)
    parts = [Part(function, up, down) for up, down in given["weights"]]
    parts[0].matrices[1].requires_grad_(not frozen)
    x = torch.from_numpy(given["x"].copy()).requires_grad_(needs)
    begin_gradients([x, *(matrix for part in parts for matrix in part.matrices)])
    inputs, y = [], x + 0.0  # x itself we hold, so whether somebody else does shows in this one only
    for part in parts:
        inputs.append(StorageWeakRef(y.untyped_storage()))
        y = exercise.checkpoint_random(part, y, generator) if random else exercise.checkpoint(part, y)
    copies = sum(each.nbytes for each in kept_by(y) if StorageWeakRef(each.untyped_storage()) not in inputs)
    found = forward_and_backward(parts, x, y, lambda: torch.rand(3, generator=generator).numpy())
    if any(not each.expired() for each in inputs):
        gc.collect()
    found |= {"copies": copies, "inputs left": [not each.expired() for each in inputs]}
    alone = Part(residual, *given["weights"][0])
    with torch.no_grad():
        exercise.checkpoint(alone, x)
    return found | {"quiet": alone.calls}


def begin_gradients(tensors: Sequence[Tensor]) -> None:
    """Let there be a gradient of ones already, of an earlier microbatch."""
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None


def run_between(exercise: Any, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5 on this rank's rows of pairs of matrices: tensor-parallel regions, and a silent tail."""
    enter, leave = (lambda note, x: copy_to(x, comm)), (lambda note, x: reduce_from(x, comm))
    parts = []
    for whole in given["weights"]:
        up, down = (np.array_split(matrix, comm.size)[comm.rank] for matrix in whole)
        bend, flat = (lambda note, x, up: note(torch.tanh(note(x @ up.T)))), (lambda note, x, down: note(x @ down))
        parts += [(Part(enter), True), (Part(bend, up), False), (Part(flat, down), False), (Part(leave), True)]
    up, down = given["weights"][0]
    parts += [(Part(bend, up), False), (Part(lambda note, x, down: x @ down, down), False)]
    x = torch.from_numpy(given["x"].copy()).requires_grad_()
    begin_gradients([x, *(matrix for part, _ in parts for matrix in part.matrices)])
    y = exercise.checkpoint_between(parts, x)
    return forward_and_backward([part for part, _ in parts], x, y) | {"sent": comm.traffic.messages_sent}


def forward_and_backward(parts: list[Part], x: Tensor, y: Tensor, draw: Callable[[], Any] = tuple) -> dict[str, Any]:
    """After forward, go back; return numbers drawn, gradients, and of each part its calls and the bytes it holds."""
    found = {"the output": y.detach().numpy(), "forward": watch(parts)}
    found["what is drawn after forward"] = draw()
    if y.requires_grad:  # else its gradients are None, which the judge says
        y.square().sum().backward()
    found["what is drawn after backward"] = draw()
    del y
    found["backward"] = watch(parts)
    named = {
        "x": x,
        **{f"matrix {i} of part {n}": p for n, part in enumerate(parts) for i, p in enumerate(part.matrices)},
    }
    nothing = torch.empty(0)
    return found | {
        f"the gradient of {name}": (nothing if p.grad is None else p.grad).numpy() for name, p in named.items()
    }


def judge_chain(case: Case, results: Sequence[Arrays], notes: Sequence[Note], **how: bool) -> None:
    """Compare with the stored run."""
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        if any(left := found["inputs left"].tolist()):
            words = (
                f"rank {rank}: after backward the inputs of blocks {np.flatnonzero(left).tolist()} are still held, as "
            )
            raise Wrong(words + "long as somebody has the result: keep x by ctx.save_for_backward, which lets it go")
        compare(rank, found, run_chain(Stored(), None, given, **how), [2] * len(given["weights"]))
        if copies := int(found["copies"]):
            raise Wrong(
                f"rank {rank}: after forward {copies} bytes are held besides x, a copy of it or y: keep x itself"
            )
        if found["quiet"] != 1:
            raise Wrong(f"rank {rank}: without gradients the block was called {found['quiet']} times, expected 1")


def judge_between(case: Case, results: Sequence[Arrays], notes: Sequence[Note], counted: bool = True) -> None:
    """Compare with the stored run, whose messages are those that are needed."""
    expected = minidist.run(lambda comm: run_between(Stored(), comm, case.given[comm.rank]), case.ranks)
    for rank, found in enumerate(results):
        compare(rank, found, expected[rank], [1, 2, 2, 1] * len(case.given[rank]["weights"]) + [2, 2])
        if counted and (sent := len(sent_by(rank, notes))) != (needed := expected[rank]["sent"]):
            raise Wrong(f"rank {rank} sent {sent} messages, expected {needed}, as without recomputing")


def compare(rank: int, found: Arrays, expected: dict[str, Any], calls: list[int]) -> None:
    """Raise `Wrong` unless the numbers agree, the parts were called so often in all, and nothing inside was held."""
    for name, value in expected.items():
        if name.startswith(("the ", "what ")):
            value = np.asarray(value)
            if found[name].size != value.size and not found[name].size * value.size:
                raise Wrong(f"rank {rank}: {name} is {'None' if value.size else 'there, but it is frozen'}")
            instead = (
                {}
                if "gradient" not in name
                else {
                    "it is not added to what .grad held, which is overwritten": value - 1,
                    "it is added to .grad twice: by the answer itself, and as what backward returns": 2 * value - 1,
                    "no gradient arrives there": np.ones_like(value),
                }
            )
            expect_close(rank, name, found[name], value, 1e-12, instead=instead)
    for when, each in (("forward", [1] * len(calls)), ("backward", calls)):
        if (called := found[when][:, 0].tolist()) != each:
            raise Wrong(f"rank {rank}: after {when} the parts were called {called} times in all, expected {each}")
        if any(held := found[when][:, 1].tolist()):
            raise Wrong(
                f"rank {rank}: after {when} {held} bytes of what each part computed inside are held, expected 0"
            )
