"""Lesson 22, solved by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce

Array = np.ndarray[Any, Any]


def sparse_all_reduce(gradient: Array, kept: Array, count: int, comm: Communicator) -> None:
    """Choose, send, and put together what came."""
    kept += gradient
    mine = np.argsort(np.abs(kept))[-count:].astype(np.int32)
    places = all_gather(mine, comm)
    values = all_gather(kept[mine], comm)
    kept[mine] = 0
    gradient[:] = 0
    for place, value in zip(places, values, strict=True):
        gradient[place] += value


class OuterStep:
    """Remember where all sites were."""

    def __init__(
        self, parameters: list[Array], comm: Communicator, every: int, lr: float, momentum: float
    ) -> None:
        self.parameters, self.comm, self.every = parameters, comm, every
        self.lr, self.momentum, self.steps = lr, momentum, 0
        self.shared = [each.copy() for each in parameters]
        self.velocities = [np.zeros_like(each) for each in parameters]

    def stepped(self) -> None:
        """Meet after every H steps."""
        self.steps += 1
        if self.steps < self.every:
            return
        self.steps = 0
        for number, parameter in enumerate(self.parameters):
            gradient = self.shared[number] - parameter
            all_reduce(gradient, self.comm, "mean")
            self.velocities[number] = self.momentum * self.velocities[number] + gradient
            step = gradient + self.momentum * self.velocities[number]
            self.shared[number] = self.shared[number] - self.lr * step
            parameter[:] = self.shared[number]


def old_weights(row: Sequence[str], batch: int) -> tuple[list[int], int]:
    """Go through the row once for the versions, and once more for the copies."""
    version, used = 0, {}
    for word in row:
        if word == "U":
            version += 1
        elif word[0] == "F" and int(word[1:]) // batch not in used:
            used[int(word[1:]) // batch] = version
    delays = [number - used[number] + 1 for number in sorted(used)]
    copies, version = 1, 0
    for position, word in enumerate(row):
        if word == "U":
            version += 1
            left = {int(each[1:]) // batch for each in row[position:] if each[0] == "B"}
            needed = {used[each] for each in left if used[each] <= version}
            copies = max(copies, len(needed | {version}))
    return delays, copies


def largest_rate(curvature: float, delay: int) -> float:
    """Halve the interval."""
    low, high = 0.0, 2.5 / curvature
    for _ in range(40):
        middle = (low + high) / 2
        polynomial = np.zeros(delay + 1)
        polynomial[0] = 1
        polynomial[1] = -1
        polynomial[-1] += middle * curvature
        if np.abs(np.roots(polynomial)).max() < 1:
            low = middle
        else:
            high = middle
    return low
