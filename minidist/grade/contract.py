"""What a lesson's `checks.py` is made of.

    CHECKS = [Check(task, "adds up every chunk", points=15, draw=..., program=..., judge=...), ...]

    parent   draw(rng) ─▶ cases ─┐                               ┌─▶ judge(case, results, notes): silence, or Wrong
    child                        └─▶ program(exercise, comm, given) on every rank ─┘

`program` is the only part that runs beside the student's code. It gets what *its* rank is given and returns arrays
or numbers by name. `judge` runs in the grader's own process, computes the right answer with numpy, and raises `Wrong`
with one sentence for the student. Counts decide (messages and bytes, from the notes), never the clock. A judge may
return figures of its own, the smaller the better ({"bubble": 0.2}): the leaderboard shows the largest of all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from minidist.comm.communicator import Communicator

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]

LARGEST_FACTOR = 64  # of ranks or microbatches, by which an answer may be wrong throughout
BY_OPTIMIZERS = ("torch._dynamo",)  # imported by the first optimizer of a process


class Wrong(Exception):
    """An answer is wrong. The text is one sentence for the student: where, what was found, what was expected."""


@dataclass(frozen=True)
class Task:
    """One task of an exercise, and what an answer may not lean on.

    `not_from` lists modules that the student's code may not call into, nor send through (`minidist.collectives`: all
    modules of that folder as well), and the communicator's shortcuts: `comm.native`, `comm.roll_call`, `comm.allocate`.
    `imports` are what an answer makes torch import when it runs, which takes seconds where its calls are watched.
    """

    number: int
    title: str
    not_from: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One run: what each rank is given, by rank, and in a few words what is special about it."""

    given: tuple[Arrays, ...]
    label: str

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.given)


@dataclass(frozen=True)
class Note:
    """What the witness saw: a message of one rank, the use of a shortcut, or a call that the task bars.

    Attributes
    ----------
    rank : int
        Who did it, as numbered in the world.
    kind : str
        `send`, `barrier` (the empty messages of one), `native`, `roll_call`, `allocate`, or `call`.
    to, bytes : int
        The receiver, as numbered in the world, and the size, of a `send`.
    through : tuple[str, ...]
        The package's modules that a message came through, innermost first; of a `call`, the module called.
    line : str
        The innermost line of the student's file, as `exercise.py:14 in ring_all_gather`.
    """

    rank: int
    kind: str
    to: int = -1
    bytes: int = 0
    through: tuple[str, ...] = ()
    line: str = ""


Draw: TypeAlias = Callable[[np.random.Generator], Sequence[Case]]
Program: TypeAlias = Callable[[ModuleType, Communicator, Arrays], Mapping[str, Any]]
Figures: TypeAlias = Mapping[str, float]
Judge: TypeAlias = Callable[[Case, Sequence[Arrays], Sequence[Note]], Figures | None]


@dataclass(frozen=True)
class Check:
    """Some points of one task: `draw` makes the cases from the seed, and each is worth an equal part."""

    task: Task
    title: str
    points: float
    draw: Draw
    program: Program
    judge: Judge
    hidden: bool = False
    wire: str = "threads"

    def __post_init__(self) -> None:
        if self.wire not in ("threads", "mpi") or self.points <= 0:
            raise ValueError(
                f"check {self.title!r}: wire={self.wire!r} must be threads or mpi, points={self.points} positive"
            )


def expect_equal(rank: int, name: str, found: Array, expected: Array) -> None:
    """Raise `Wrong` unless both arrays have the same shape and values; the first difference is named."""
    if found.shape != expected.shape:
        raise Wrong(f"rank {rank}: {name} has shape {found.shape}, expected {expected.shape}")
    different = np.argwhere(found != expected)
    if len(different):
        where = tuple(int(i) for i in different[0])
        index = f"[{', '.join(map(str, where))}]" if where else ""
        raise Wrong(f"rank {rank}: {name}{index} is {found[where]}, expected {expected[where]}")


def expect_close(rank: int, name: str, found: Array, expected: Array, tolerance: float = 1e-9) -> None:
    """Raise `Wrong` unless both have the same shape and differ by at most `tolerance` times the largest expected value.

    For float64 that was added up in another order. What is not a number differs from everything.
    """
    if found.shape != expected.shape:
        raise Wrong(f"rank {rank}: {name} has shape {found.shape}, expected {expected.shape}")
    if found.size and not (far := np.abs(found - expected)).max() <= tolerance * max(np.abs(expected).max(), 1e-300):
        where = tuple(int(i) for i in np.unravel_index(np.nanargmax(np.where(far == far, far, np.inf)), found.shape))
        index = f"[{', '.join(map(str, where))}]" if where else ""
        hint = scaled(found, expected, tolerance)
        raise Wrong(f"rank {rank}: {name}{index} is {found[where]:.9g}, expected {expected[where]:.9g}{hint}")


def scaled(found: Array, expected: Array, tolerance: float) -> str:
    """Return what is to be said if everything is a whole factor too large or small: a sum that should be a mean."""
    for small, large, part in ((expected, found, "{} times"), (found, expected, "1/{} of")):
        times = round(np.abs(large).sum() / max(np.abs(small).sum(), 1e-300)) if np.isfinite(found).all() else 0
        if 1 < times <= LARGEST_FACTOR and np.abs(large - times * small).max() <= tolerance * np.abs(large).max():
            return f": all of it is {part.format(times)} that"
    return ""


def sent_by(rank: int, notes: Sequence[Note]) -> list[Note]:
    """Return the messages that a rank sent, in order, those of barriers left out."""
    return [note for note in notes if note.rank == rank and note.kind == "send"]


def barred(task: Task, name: str) -> bool:
    """Tell whether a task bars a module, or a shortcut as `comm.native`."""
    return any(name == each or name.startswith(each + ".") for each in task.not_from)


def leaning(task: Task, notes: Sequence[Note]) -> str:
    """Return the sentence that costs the task, if it was not built by hand; else nothing."""
    verbs = {"send": "sends through", "barrier": "sends through", "call": "calls"}
    for note in notes:
        names = note.through if note.kind in verbs else (f"comm.{note.kind}",)
        for name in names:
            if barred(task, name):
                where, verb = note.line or f"rank {note.rank}", verbs.get(note.kind, "uses")
                return f"task {task.number} is to be built by hand, but {where} {verb} {name}"
    return ""
