"""Lesson 11: recomputation ("gradient checkpointing"): keep little in forward, compute it again in backward.

    forward     x ──▶ block ──▶ y        keep x, forget what the block saved
    backward    x ──▶ block again ──▶ its gradients, from the gradient of y

Fill in the functions; their docstrings are the contract. You need `torch.autograd.Function`, `torch.enable_grad` and
`torch.autograd.grad`. `minidist.memory` and `torch.utils.checkpoint` are what you are building: calling them scores
nothing.

    mpirun -n 2 python exercise.py          try it on real processes
    python -m minidist grade 11             points, and what is still wrong

Words, in all tasks. `inputs[l]` are the bytes of the input of block l; `saved[l]` the bytes of all that autograd keeps
of block l for backward, its input among it; `seconds[l]` the time of its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.parallel.adjoint import copy_to, reduce_from

Plan: TypeAlias = "Sequence[int | tuple[int, ...]]"
"""All blocks in order. A number is stored; those in a tuple are a segment, recomputed together from the input of its
first: `[0, (1, 2), 3]` stores 0 and 3, keeps the input of 1, and computes 1 and 2 again in backward."""


def account(plan: Plan, inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float]) -> tuple[int, float]:
    """Task 1a: return the most bytes of activations that a plan holds at one time, and the seconds that it recomputes.

    In forward, a stored block leaves `saved[l]` bytes, a segment the input of its first block. Backward goes through
    the parts of the plan from last to first. When it comes to a segment, the `saved` of all blocks in it are there
    again (the segment's own input counts once: it is among the `saved` of its first block), and with them what the
    parts before left. What the parts after left is gone by then. Gradients do not count.
    """
    raise NotImplementedError("task 1 is not started")


def best_length(layers: int, input_bytes: int, saved_bytes: int) -> int:
    """Task 1b: return the length k, from 1 to `layers`, for which k * saved_bytes + ceil(layers/k) * input_bytes is
    smallest; of several the smallest k. That is the peak of equal blocks in segments of k, and for the gradient
    of a block's output, which `account` leaves out, the bytes of one input more.
    """
    raise NotImplementedError("task 1 is not started")


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Task 2: return `block(x)`, and compute it again in backward.

    Held between forward and backward: `x` itself and no other activation, not even a copy of `x`. After backward
    nothing is held, even while the caller still has what you returned.
    Calls of `block`: one in forward, one more in backward.
    Gradients: of `x`, if it needs one, and of those parameters of `block` that need one, also if `x` needs none (as in
    the first block of a network). They arrive as they do without a checkpoint: added to what `.grad` holds.
    Without gradients (`torch.no_grad()`): `block(x)`, called once.

    Hints. What an `autograd.Function` does in its `forward` is not recorded, so it saves nothing. Its `backward` is
    called only if one of the *tensors among the arguments of `apply`* needs a gradient: pass it the parameters too
    (`Again.apply(block, x, *parameters)`), and return one gradient for each argument, None where there is none.
    `torch.autograd.grad` refuses inputs that need no gradient. Keep tensors by `ctx.save_for_backward`, and compute
    again on `x.detach()`: backward must not walk on into the graph before `x`.
    """
    raise NotImplementedError("task 2 is not started")


def checkpoint_random(block: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Task 3: as task 2, for a block that draws from `generator` (dropout, say).

    The second run draws the same numbers as the first. And nobody notices that there was one: after forward and after
    backward, `generator` is where it would be if nothing had been computed again. (Between them others may have drawn
    from it: blocks that come later, the next batch.) `generator.get_state()` returns a copy of its state,
    `generator.set_state(state)` puts it back. The state may be kept, a few kilobytes; activations may not.
    """
    raise NotImplementedError("task 3 is not started")


def fastest_plan(inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float], budget: int) -> Plan:
    """Task 4: return a plan whose peak, as `account` says, is at most `budget`, and that recomputes the fewest seconds.

    Blocks differ; there are up to 24 of them, and 3**23 * 2 ways are too many to try. Bytes are small whole numbers
    here (think of MiB). Any of several best plans will do.

    Hint: the best plan of blocks l, l+1, ... depends only on l and on the room that the parts before have left of the
    budget. It begins with a stored block or with a segment; what follows is the best plan of fewer blocks in less room.
    `functools.cache` on an inner function remembers what is solved.

    Raises
    ------
    ValueError
        If no plan fits.
    """
    raise NotImplementedError("task 4 is not started")


def checkpoint_between(parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
    """Task 5: run `parts` one after the other, recomputing all that is silent, and send no message a second time.

    Parameters
    ----------
    parts
        (module, whether it communicates, in its forward or its backward). A module maps one tensor to one.

    Neighbours that do not communicate form *one* segment, of which the input is kept (task 2), also those before the
    first part that communicates and those behind the last. A part that
    communicates runs once, and is not computed again; what it returns may be kept.
    """
    raise NotImplementedError("task 5 is not started")


class Enter(nn.Module):
    """Into a tensor-parallel region: sends nothing in forward, an all-reduce of the gradient in backward."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return copy_to(x, self.comm)


class Leave(Enter):
    """Out of the region: an all-reduce in forward, nothing in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`."""
        return reduce_from(x, self.comm)


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    inputs, saved, seconds = [4, 4, 4, 4], [20, 60, 60, 20], [1.0, 1.0, 1.0, 1.0]
    linear = nn.Linear(3, 3, dtype=torch.float64, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.copy_(torch.eye(3) * 0.5)
        linear.bias.fill_(0.1)
    block = nn.Sequential(linear, nn.Tanh())
    x = torch.ones(1, 3, dtype=torch.float64)

    def task_1() -> str:
        peak, again = account([0, (1, 2), 3], inputs, saved, seconds)
        return (
            f"{peak} bytes at the peak, {again} seconds again; of 64 blocks with A = 4 c, k = {best_length(64, 1, 4)}"
        )

    def task_2() -> str:
        checkpoint(block, x).sum().backward()
        return f"the gradient of the bias is {linear.bias.grad}"

    def task_3() -> str:
        generator = torch.Generator().manual_seed(0)
        y = checkpoint_random(block, x, generator)
        y.sum().backward()
        return f"the next number is {torch.rand((), generator=generator):.6f}"

    def task_4() -> str:
        return f"within 130 bytes: {fastest_plan(inputs, saved, seconds, 130)}"

    def task_5() -> str:
        parts = [(Enter(comm), True), (linear, False), (nn.Tanh(), False), (Leave(comm), True), (nn.Tanh(), False)]
        start = x.clone().requires_grad_()
        checkpoint_between(parts, start).sum().backward()
        return f"the gradient of x is {start.grad}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
