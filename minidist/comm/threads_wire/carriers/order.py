"""Who goes on next: drawn by a seed, or as a schedule says that somebody wrote down before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from minidist.comm.errors import LaunchError


class Named(Protocol):
    """Whoever may go on: a rank, or a stream of one."""

    name: str


# takes those who may go on, and returns the place of the one that does
Order: TypeAlias = Callable[[Sequence[Named]], int]


def drawn(seed: int) -> Order:
    """Return an order in which everybody is equally likely to be the next."""
    number = random.Random(seed).random
    return lambda ready: int(number() * len(ready))


def repeated(schedule: Sequence[str]) -> Order:
    """Return the order that a schedule names, step by step. Behind its end the first one goes on.

    Raises
    ------
    LaunchError
        When the one that is named cannot go on: the schedule is of another program.
    """
    left = iter(enumerate(schedule))

    def choose(ready: Sequence[Named]) -> int:
        names = [task.name for task in ready]
        step, name = next(left, (0, names[0]))
        if name not in names:
            raise LaunchError(
                f"step {step} of the schedule is of {name}, but only {', '.join(names)} can go on: "
                "the schedule belongs to another program, or to other arguments of run()"
            )
        return names.index(name)

    return choose
