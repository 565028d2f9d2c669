"""Lesson 11 answered by hand, from the handout alone: plans, checkpoints, and the search for the
best plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Plan: TypeAlias = "Sequence[int | tuple[int, ...]]"
"""All blocks in order: a number is stored, those in a tuple are recomputed together."""


def account(
    plan: Plan, inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float]
) -> tuple[int, float]:
    """Task 1a: return the most bytes that a plan holds at one time, and the seconds that it
    recomputes.
    """
    left, peak, again = 0, 0, 0.0  # left: what the parts up to here keep after their forward
    for part in plan:
        if isinstance(part, tuple):
            # when backward is in this segment
            peak = max(peak, left + sum(saved[block] for block in part))
            again += sum(seconds[block] for block in part)
            left += inputs[part[0]]
        else:
            left += saved[part]
            peak = max(peak, left)
    return peak, again


def best_length(layers: int, input_bytes: int, saved_bytes: int) -> int:
    """Task 1b: return the segment length with the smallest peak, of several the smallest length."""
    return min(range(1, layers + 1), key=lambda k: k * saved_bytes + -(-layers // k) * input_bytes)


class Again(torch.autograd.Function):
    """Runs a block without a record, and once more, with one, in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        block: nn.Module,
        generator: torch.Generator | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Keep the input (and where the generator is), and nothing that the block computes."""
        ctx.block, ctx.generator = block, generator
        ctx.state = None if generator is None else generator.get_state()
        ctx.save_for_backward(x, *parameters)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run the block again, and differentiate that run."""
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[2])
        before = None if ctx.generator is None else ctx.generator.get_state()
        try:
            if ctx.generator is not None:
                ctx.generator.set_state(ctx.state)
            with torch.enable_grad():
                y = ctx.block(x)
        finally:
            if ctx.generator is not None:
                ctx.generator.set_state(before)
        wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient, allow_unused=True))
        return (
            None,
            None,
            *(next(found) if tensor.requires_grad else None for tensor in (x, *parameters)),
        )


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Task 2: return `block(x)`, and compute it again in backward."""
    return Again.apply(block, None, x, *block.parameters())


def checkpoint_random(block: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Task 3: as task 2, for a block that draws from `generator`."""
    return Again.apply(block, generator, x, *block.parameters())


def fastest_plan(
    inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float], budget: int
) -> Plan:
    """Task 4: return a plan that fits into the budget and recomputes the fewest seconds."""
    layers = len(saved)

    @cache
    def best(first: int, room: int) -> tuple[float, tuple[int | tuple[int, ...], ...]]:
        """Return the seconds and the plan of the blocks from `first` on; infinitely many if nothing
        fits.
        """
        if first == layers:
            return 0.0, ()
        found: tuple[float, tuple[int | tuple[int, ...], ...]] = (inf, ())
        if saved[first] <= room:
            time, rest = best(first + 1, room - saved[first])
            found = (time, (first, *rest))
        for end in range(first + 1, layers + 1):
            if sum(saved[first:end]) > room:
                break
            time, rest = best(end, room - inputs[first])
            time += sum(seconds[first:end])
            if time < found[0]:
                found = (time, (tuple(range(first, end)), *rest))
        return found

    time, plan = best(0, budget)
    if time == inf:
        raise ValueError(f"no plan of these {layers} blocks fits into {budget} bytes")
    return plan


def checkpoint_between(parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
    """Task 5: run `parts` one after the other, recompute all that is silent, and send nothing a
    second time.
    """
    for communicates, neighbours in groupby(parts, key=lambda part: part[1]):
        modules = [module for module, _ in neighbours]
        if communicates:
            for module in modules:
                x = module(x)
        else:
            x = checkpoint(nn.Sequential(*modules), x)
    return x
