"""Lesson 11: recomputation ("gradient checkpointing"): keep little in forward, compute it again in
backward.

    forward     x ──▶ block ──▶ y        keep x, forget what the block saved
    backward    x ──▶ block again ──▶ its gradients, from the gradient of y

Fill in the functions; their docstrings are the contract. You need `torch.autograd.Function`,
`torch.enable_grad` and `torch.autograd.grad`. `minidist.full.memory`, `minidist.plan` and
`torch.utils.checkpoint` are what you are building: calling them scores nothing.

    mpirun -n 2 python exercise.py          try it on real processes
    python -m minidist grade 11             points, and what is still wrong

In all tasks, `inputs[l]` is the number of bytes of the input of block l. `saved[l]` is the number
of bytes of everything that autograd keeps of block l for backward, including the input of the
block. `seconds[l]` is the time of its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.full.adjoint import copy_to, reduce_from

Plan: TypeAlias = "Sequence[int | tuple[int, ...]]"
"""All blocks in order. A block that stands alone, as a number, is stored. The blocks of a tuple are
a segment: forward keeps the input of the first block of the tuple, and backward computes all of
them again. `[0, (1, 2), 3]` stores blocks 0 and 3, keeps the input of block 1, and computes blocks
1 and 2 again. A tuple may hold a single block: `(1,)`.
"""


def account(
    plan: Plan, inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float]
) -> tuple[int, float]:
    """Task 1a: return the most bytes of activations that a plan holds at one time, and the seconds
    that it recomputes.

    The parts of a plan are its stored blocks and its segments. In forward, a stored block l leaves
    `saved[l]` bytes in memory, and a segment leaves the `inputs` of its first block. Backward goes
    through the parts from last to first. When backward reaches a segment, it holds the `saved` of
    all blocks of this segment, and also what the parts before it have left. (The segment's input
    counts once: it is already part of the `saved` of its first block.) What later parts left has
    been freed by then. Gradients do not count.
    """
    raise NotImplementedError("task 1 is not started")


def best_length(layers: int, input_bytes: int, saved_bytes: int) -> int:
    """Task 1b: return the segment length k, from 1 to `layers`, that makes k * saved_bytes +
    ceil(layers/k) * input_bytes smallest. If several k do, return the smallest of them. The formula
    is the peak of equal blocks in segments of k blocks, plus the bytes of one input: they stand for
    the gradient of a block's output, which `account` does not count.
    """
    raise NotImplementedError("task 1 is not started")


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Task 2: return `block(x)`; in backward, compute the block again instead of keeping its
    activations.

    - Memory: between forward and backward you hold `x` itself and no other activation, not even a
      copy of `x`. After backward you hold nothing, even while the caller still has the tensor that
      you returned.
    - Calls: `block` is called once in forward and once more in backward.
    - Gradients: `x` gets one if it needs one. So do those parameters of `block` that need one, even
      if `x` needs none (as in the first block of a network). Gradients are added to what `.grad`
      already holds, as without a checkpoint.
    - Without gradients (`torch.no_grad()`): return `block(x)`, called once.

    Hints. Autograd does not record the operations inside the `forward` of an `autograd.Function`,
    so it saves nothing there. Autograd calls the function's `backward` only if one of the *tensors
    among the arguments of `apply`* needs a gradient. So pass the parameters too
    (`Again.apply(block, x, *parameters)`). `backward` returns one gradient for each argument, and
    None where there is none. `torch.autograd.grad` refuses inputs that need no gradient. Keep
    tensors with `ctx.save_for_backward`. Compute again on `x.detach()`: the second run must not
    continue into the graph that produced `x`.
    """
    raise NotImplementedError("task 2 is not started")


def checkpoint_random(block: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Task 3: do the same as in task 2 for a block that draws random numbers from `generator`
    (dropout, for example).

    The second run must draw the same numbers as the first. It must also leave no trace in the
    generator: after forward and after backward, `generator` has the same state as if nothing had
    been computed again. (Between forward and backward, others may have drawn from it: later blocks,
    or the next batch.) `generator.get_state()` returns a copy of the state, and
    `generator.set_state(state)` puts a state back. You may keep the state, a few kilobytes, but no
    activations.
    """
    raise NotImplementedError("task 3 is not started")


def fastest_plan(
    inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float], budget: int
) -> Plan:
    """Task 4: return the plan that recomputes the fewest seconds among all plans that fit into
    `budget`.

    A plan fits if its peak, the first number that `account` returns, is at most `budget`. Return
    the plan itself, in the form that `Plan` describes: `[0, (1, 2), 3]`, for example, a list or a
    tuple that has every block once, in order. If several plans that fit recompute equally few
    seconds, return any of them. Where everything can be stored, that is the plan without segments.

    The blocks differ from each other. There are up to 24 blocks, so up to 2 * 3**23 plans: too many
    to try. Bytes are small whole numbers here (think of MiB).

    Hint: the best plan of blocks l, l+1, ... depends only on l and on the room, the bytes of the
    budget that the parts before l have left. The best plan begins with a stored block or with a
    segment. After this first part comes the best plan of the remaining blocks in the remaining
    room. `functools.cache` on an inner function remembers solved cases.

    Raises
    ------
    ValueError
        If no plan fits into `budget`.
    """
    raise NotImplementedError("task 4 is not started")


def checkpoint_between(parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
    """Task 5: return what `parts` give, run one after the other on `x`; recompute those that do not
    communicate.

    Parameters
    ----------
    parts
        Pairs (module, communicates). `communicates` is True if the module sends messages in its
        forward or in its backward. Each module maps one tensor to one tensor.

    Neighbouring parts that do not communicate form *one* segment: keep its input and compute it
    again in backward, as in task 2. This also holds for the parts before the first part that
    communicates, and for those after the last. A part that communicates runs once and is never
    computed again, so no message is sent a second time. You may keep what such a part returns.
    """
    raise NotImplementedError("task 5 is not started")


class Enter(nn.Module):
    """Into a tensor-parallel region: sends nothing in forward, an all-reduce of the gradient in
    backward.
    """

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
            f"{peak} bytes at the peak, {again} seconds again; of 64 blocks with A = 4 c, k = "
            f"{best_length(64, 1, 4)}"
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
        parts = [
            (Enter(comm), True),
            (linear, False),
            (nn.Tanh(), False),
            (Leave(comm), True),
            (nn.Tanh(), False),
        ]
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
