"""Lesson 22, solved: `minidist/slow_wires.py`, and the plans of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sin
from typing import Any

import numpy as np
import torch
from torch import nn

from minidist import Communicator, slow_wires
from minidist.full.pipeline.actions import Action, Kind, Plan
from minidist.further.stale.plans import most_versions, newest

Array = np.ndarray[Any, Any]


def sparse_all_reduce(gradient: Array, kept: Array, count: int, comm: Communicator) -> None:
    """On the same memory, as tensors."""
    slow_wires.sparse_all_reduce(torch.from_numpy(gradient), torch.from_numpy(kept), count, comm)


class OuterStep:
    """DiLoCo's page, on the same memory."""

    def __init__(
        self, parameters: list[Array], comm: Communicator, every: int, lr: float, momentum: float
    ) -> None:
        tensors = [nn.Parameter(torch.from_numpy(each)) for each in parameters]
        self.outer = slow_wires.DiLoCo(tensors, comm, every, lr, momentum)

    def stepped(self) -> None:
        """Count, and meet."""
        self.outer.stepped()


def old_weights(row: Sequence[str], batch: int) -> tuple[list[int], int]:
    """A plan of one stage."""
    actions, last = [], 0
    for word in row:
        if word != "U":
            last = int(word[1:])
        actions.append(Action(Kind(word[0]), 0, last))
    count = sum(each.kind == Kind.FORWARD for each in actions)
    plan = Plan("one stage", 1, 1, count, (0,), (tuple(actions),), batch)
    versions = newest(plan)
    delays = [t - version + 1 for t, version in enumerate(versions[0][::batch])]
    return delays, most_versions(plan, versions)[0]


def largest_rate(curvature: float, delay: int) -> float:
    """Where the first pair of roots reaches the unit circle: z = e^(iφ) with φ = π/(2d - 1)."""
    return 2 * sin(pi / (4 * delay - 2)) / curvature
