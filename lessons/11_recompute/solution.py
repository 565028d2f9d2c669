"""Lesson 11, solved: the package's own checkpoint. Read it in `minidist/recompute.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn

from minidist import recompute
from minidist.full.recompute.segments import best_interval

Plan: TypeAlias = "Sequence[int | tuple[int, ...]]"


def account(
    plan: Plan, inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float]
) -> tuple[int, float]:
    """Return the peak of bytes and the seconds recomputed."""
    peak, left, again = 0, 0, 0.0
    for part in plan:
        blocks = part if isinstance(part, tuple) else (part,)
        peak = max(peak, left + sum(saved[block] for block in blocks))
        left += inputs[blocks[0]] if isinstance(part, tuple) else saved[part]
        again += sum(seconds[block] for block in blocks) if isinstance(part, tuple) else 0.0
    return peak, again


def best_length(layers: int, input_bytes: int, saved_bytes: int) -> int:
    """Return the k that makes k * A + ceil(L/k) * c smallest."""
    return best_interval(layers, input_bytes, saved_bytes)


def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """Keep `x`, and call `block` again in backward."""
    return recompute.checkpoint(block, x, block.parameters())


def checkpoint_random(block: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Keep the state of `generator` as well."""
    return recompute.checkpoint(block, x, block.parameters(), generator)


def fastest_plan(
    inputs: Sequence[int], saved: Sequence[int], seconds: Sequence[float], budget: int
) -> Plan:
    """Plan by dynamic programming. `plan/memory/chain.py` does so for plans that nest, with
    gradients.
    """

    @cache
    def best(first: int, room: int) -> tuple[float, tuple[int | tuple[int, ...], ...]] | None:
        """Seconds and plan of blocks `first` and following in `room` bytes."""
        if first == len(saved):
            return 0.0, ()
        candidates = []
        for end in range(first + 1, len(saved) + 1):
            if sum(saved[first:end]) > room:
                break
            if rest := best(end, room - inputs[first]):
                candidates.append(
                    (sum(seconds[first:end]) + rest[0], (tuple(range(first, end)), *rest[1]))
                )
        if saved[first] <= room and (rest := best(first + 1, room - saved[first])):
            candidates.append((rest[0], (first, *rest[1])))
        return min(candidates, key=lambda candidate: candidate[0], default=None)

    found = best(0, budget)
    if found is None:
        raise ValueError(f"no plan of these {len(saved)} blocks fits into {budget} bytes")
    return found[1]


def checkpoint_between(parts: Sequence[tuple[nn.Module, bool]], x: Tensor) -> Tensor:
    """Checkpoint neighbouring parts that do not communicate as one segment."""
    for communicates, run in groupby(parts, key=lambda part: part[1]):
        part = nn.Sequential(*(module for module, _ in run))
        x = part(x) if communicates else checkpoint(part, x)
    return x
