"""Lesson 11, tasks 2 and 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, known


class Part(nn.Module):
    """A function of x and some matrices that counts its calls, and knows which of its activations
    are alive.
    """

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
            found += [
                each for each in several if isinstance(each, Tensor) and each.is_floating_point()
            ]
        nodes += [after for after, _ in getattr(node, "next_functions", ()) if after not in nodes]
    return [tensor for tensor in found if not isinstance(tensor, nn.Parameter)]


def watch(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return for each part how often it was called, and the bytes of what it computed inside that
    are alive.
    """
    if any(not made.expired() for part in parts for made, _ in part.made):
        gc.collect()  # slow, and seldom needed
    return [
        (part.calls, sum(size for made, size in part.made if not made.expired())) for part in parts
    ]


def residual(
    note: Any, x: Tensor, up: Tensor, down: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return x + down(dropout(tanh(up(x)))), with dropout if there is a generator to draw from. x
    is [B, D].
    """
    inner = note(torch.tanh(note(x @ up.T)))
    if generator is not None:
        drawn = torch.rand(inner.shape, generator=generator, dtype=torch.float64)
        inner = note(inner * note((drawn < 0.5) * 2.0))
    return x + inner @ down


class Stored:
    """The answers without recomputing: what the numbers have to be."""

    def __init__(self, how: str = "") -> None:
        self.how = how  # one of `SLIPS`, by which the numbers are wrong

    def checkpoint(self, block: nn.Module, x: Tensor, *_: object) -> Tensor:
        """Call it."""
        y = block(x)
        if self.how == "ones" and y.requires_grad:
            y.register_hook(torch.ones_like)
        return y

    def checkpoint_random(self, block: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
        """Call it; if something is wrong with the numbers, do it again in backward."""
        if self.how not in DRAWN:
            return self.checkpoint(block, x)
        return Redrawn.apply(self.how, block, generator, x, *block.parameters())

    def checkpoint_between(self, parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
        """Call one after the other."""
        several = [part for part, _ in parts]
        while self.how == "no tail" and not parts[-1][1]:
            parts, several = parts[:-1], several[:-1]
        several = several[1:] if self.how == "no head" else several
        for part in several:
            x = part(x)
        return x


class Redrawn(torch.autograd.Function):
    """A block that is computed again with other random numbers, as `how` says."""

    @staticmethod
    def forward(
        ctx: Any, how: str, block: nn.Module, generator: torch.Generator, x: Tensor, *rest: Tensor
    ) -> Tensor:
        """Remember where the generator stands before, or after."""
        ctx.how, ctx.block, ctx.generator, before = how, block, generator, generator.get_state()
        y = block(x)
        ctx.states = before, generator.get_state()
        ctx.save_for_backward(x, *rest)
        if how == "put back in forward":
            generator.set_state(before)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Compute again from the wrong state, and leave the generator as it was, or not."""
        (x, *rest), generator, how = ctx.saved_tensors, ctx.generator, ctx.how
        now, (before, after) = generator.get_state(), ctx.states
        if how == "state after":
            generator.set_state(after)
        elif how in ("seed", "zero"):
            generator.manual_seed(generator.initial_seed() if how == "seed" else 0)
        elif how not in ("goes on", "draws on"):
            generator.set_state(before)
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_(each.requires_grad) for each in (x, *rest)]
            y = ctx.block.function(lambda tensor: tensor, inputs[0], *inputs[1:])
        back = {"ends at the start": before, "ends after forward": after}.get(how, now)
        if how not in ("rewinds", "draws on"):
            generator.set_state(back)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        return None, None, None, *(next(found) if each.requires_grad else None for each in inputs)


DRAWN = {
    "goes on": "the second run goes on drawing where the generator stands in backward: set the state of "
    "forward first",
    "state after": "the state is taken after the first run; the second has to begin where the first began",
    "seed": "the second run begins from the generator's seed, not where the first run of this block "
    "began",
    "zero": "the second run begins from a seed of its own",
    "put back in forward": "forward itself leaves no trace in the generator; its first run has to",
    "ends at the start": "after backward the generator stands where forward began: put back where it stood in "
    "backward",
    "ends after forward": "after backward it stands where this block's forward ended: others have drawn since",
    "draws on": "the second run goes on drawing where the generator stands in backward, and leaves its trace "
    "there",
    "rewinds": "the second run leaves its trace: after it, put the generator back where it stood",
}
NOBODY_CALLS = (
    "the parameters are not passed to `apply`: x needs no gradient here, so autograd sees nothing "
    "that does, and never calls backward"
)
SLIPS = {
    "ones": "backward does not multiply by the gradient that comes in",
    "no tail": "the parts after the last one that communicates are left out",
    "no head": "the first part is left out",
    **DRAWN,
}


def run_chain(
    exercise: Any,
    comm: Communicator,
    given: Arrays,
    needs: bool = True,
    frozen: bool = False,
    random: bool = False,
) -> dict[str, Any]:
    """Run task 2 or 3 on one block after the other, forward and backward; note calls, bytes held,
    and draws.
    """
    generator = torch.Generator().manual_seed(int(given["seed"]))
    function = partial(residual, generator=generator if random else None)
    parts = [Part(function, up, down) for up, down in given["weights"]]
    parts[0].matrices[1].requires_grad_(not frozen)
    x = torch.from_numpy(given["x"].copy()).requires_grad_(needs)
    begin_gradients([x, *(matrix for part in parts for matrix in part.matrices)])
    # x itself we hold, so whether somebody else does shows in this one only
    inputs, y = [], x + 0.0
    for part in parts:
        inputs.append(StorageWeakRef(y.untyped_storage()))
        y = (
            exercise.checkpoint_random(part, y, generator)
            if random
            else exercise.checkpoint(part, y)
        )
    copies = sum(
        each.nbytes for each in kept_by(y) if StorageWeakRef(each.untyped_storage()) not in inputs
    )
    try:
        found = forward_and_backward(
            parts, x, y, lambda: torch.rand(3, generator=generator).numpy()
        )
    except RuntimeError as error:
        why = next((why for words, why in REFUSED.items() if words in str(error)), "")
        gradients = (
            f"x [5, 6] {'needs a' if needs else 'needs no'} gradient, "
            f"{'one' if frozen else 'no'} matrix is frozen"
        )
        error.args = (f"{error}{why} ({gradients})",)
        raise
    if any(not each.expired() for each in inputs):
        gc.collect()
    found |= {"copies": copies, "inputs left": [not each.expired() for each in inputs]}
    alone = Part(residual, *given["weights"][0])
    with torch.no_grad():
        exercise.checkpoint(alone, x)
    return found | {"quiet": alone.calls}


REFUSED = {  # what autograd says of an answer, and why
    "and does not have a grad_fn": ": compute again inside of torch.enable_grad(): in backward nothing is recorded",
    "Tensors does not require grad": ": ask for the gradients of those alone that need one",
    "appears to not have been used": ": what is computed again was not computed from the x whose gradient is asked for",
    "returned an incorrect number of gradients": ": backward returns one for each argument of forward",
}


def begin_gradients(tensors: Sequence[Tensor]) -> None:
    """Let there be a gradient of ones already, of an earlier microbatch."""
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor) if tensor.requires_grad else None


def forward_and_backward(
    parts: list[Part], x: Tensor, y: Tensor, draw: Callable[[], Any] = tuple
) -> dict[str, Any]:
    """After forward, go back; return numbers drawn, gradients, and of each part its calls and the
    bytes it holds.
    """
    found = {"the output": y.detach().numpy(), "forward": watch(parts)}
    found["what is drawn after forward"] = draw()
    if y.requires_grad:  # else its gradients are None, which the judge says
        y.square().sum().backward()
    found["what is drawn after backward"] = draw()
    del y
    found["backward"] = watch(parts)
    named = {
        "x": x,
        **{
            f"matrix {i} of part {n}": p
            for n, part in enumerate(parts)
            for i, p in enumerate(part.matrices)
        },
    }
    nothing = torch.empty(0)
    return found | {
        f"the gradient of {name}": (nothing if p.grad is None else p.grad).numpy()
        for name, p in named.items()
    }


def judge_chain(case: Case, results: Sequence[Arrays], notes: Sequence[Note], **how: bool) -> None:
    """Compare with the stored run."""
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        if any(left := found["inputs left"].tolist()):
            words = (
                f"rank {rank}: after backward the inputs of blocks "
                f"{np.flatnonzero(left).tolist()} are still held, as "
            )
            raise Wrong(
                words
                + (
                    "long as somebody has the result: keep x by ctx.save_for_backward, which lets "
                    "it go"
                )
            )
        wrongly = cache(lambda slip, given=given: run_chain(Stored(slip), None, given, **how))
        silent = NOBODY_CALLS if not how.get("needs", True) else "no gradient arrives there"
        compare(rank, found, wrongly(""), [2] * len(given["weights"]), wrongly, silent)
        if copies := int(found["copies"]):
            raise Wrong(
                f"rank {rank}: after forward {copies} bytes are held besides x, a copy of it "
                "or y: keep x itself"
            )
        if found["quiet"] != 1:
            raise Wrong(
                f"rank {rank}: without gradients the block was called {found['quiet']} times, "
                "expected 1"
            )


def compare(
    rank: int,
    found: Arrays,
    expected: dict[str, Any],
    calls: list[int],
    wrongly: Callable[[str], Arrays],
    silent: str = "no gradient arrives there",
) -> None:
    """Raise `Wrong` unless the numbers agree, the parts were called so often in all, and nothing
    inside was held.
    """
    for name, value in expected.items():
        if name.startswith(("the ", "what ")):
            value = np.asarray(value)
            if found[name].size != value.size and not found[name].size * value.size:
                raise Wrong(
                    f"rank {rank}: {name} is {'None' if value.size else 'there, but it is frozen'}"
                )
            instead: dict[str, Any] = {
                clause: lambda how=how, name=name: wrongly(how)[name]
                for how, clause in SLIPS.items()
            }
            if "gradient" in name:
                instead = {
                    "it is not added to what .grad held, which is overwritten": value - 1,
                    "it is added to .grad twice: by the answer itself, and as what backward "
                    "returns": 2 * value - 1,
                    silent: np.ones_like(value),
                    **instead,
                }
            expect_close(rank, name, found[name], value, 1e-12, instead=instead)
    for when, each in (("forward", [1] * len(calls)), ("backward", calls)):
        if (called := found[when][:, 0].tolist()) != each:
            ways = {
                "nothing is computed again": [1] * len(calls),
                "everything is computed again, also what communicates": [2] * len(calls),
                "what communicates is computed again, and the rest is not": [
                    3 - count for count in calls
                ],
            }
            ways["all is computed twice as often as it has to be"] = [2 * count for count in each]
            ways["the block is computed twice in forward"] = (
                [2] * len(calls) if when == "forward" else []
            )
            says = (
                f"rank {rank}: after {when} the parts were called {called} times in all, expected "
                f"{each}"
            )
            raise Wrong(
                says
                + known(dict(reversed(ways.items())) if when == "forward" else ways, called.__eq__)
            )
        if any(held := found[when][:, 1].tolist()):
            says = (
                f"rank {rank}: after {when} {held} bytes of what each part computed inside are "
                "held, expected 0"
            )
            raise Wrong(says + who_keeps(found, calls, when))


def who_keeps(found: Arrays, calls: list[int], when: str) -> str:
    """Say which parts keep what they should compute again, or nothing."""
    again = found["backward"][:, 0].tolist()
    stored = [
        n for n, (count, needed) in enumerate(zip(again, calls, strict=True)) if count < needed
    ]
    if when == "backward" or not stored:
        if when == "forward" and 1 in calls:
            return (
                ": each part is a segment of its own; neighbours form one, which keeps its first "
                "input alone"
            )
        return ": somebody has it still, so it was kept and not only computed again"
    last = max((n for n, needed in enumerate(calls) if needed == 1), default=-1)
    if 1 in calls and again == [3 - needed for needed in calls]:
        return ": what communicates is computed again, and the rest is not"
    if stored == [n for n, needed in enumerate(calls) if needed > 1]:
        return ": nothing is recomputed, each part is stored"
    if min(stored) > last >= 0:
        return ": the parts after the last one that communicates are a segment, too"
    return f": parts {stored} are stored, and not computed again"
