"""What a lesson's `checks.py` is made of.

    CHECKS = [Check(task, "adds up every chunk", points=15, draw=..., program=..., judge=...), ...]

    parent   draw(rng) ─▶ cases ─┐                               ┌─▶ judge(case, results, notes): silence, or Wrong
    child                        └─▶ program(exercise, comm, given) on every rank ─┘

`program` is the only part that runs beside the student's code. It gets what *its* rank is given,
and returns arrays or numbers by name. `judge` runs in the grader's own process, computes the right
answer with numpy, and raises `Wrong` with one sentence for the student; a program may raise it,
too. `compare.py` finds the words for a wrong value. What decides are counts of messages and bytes,
from the notes, and never the clock. A judge may return figures of its own ({"bubble": 0.2}), the
smaller the better; the leaderboard shows the largest of all cases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minidist.course.grader.compare import (
    SEEN,
    Array,
    Arrays,
    Wrong,
    expect,
    expect_close,
    expect_equal,
    expect_ranks,
    known,
)
from minidist.full.comm.communicator import Communicator
from minidist.full.trace import Trace

# for checks, which import all from here
__all__ = [
    "SEEN",
    "Array",
    "Arrays",
    "Wrong",
    "expect",
    "expect_close",
    "expect_equal",
    "expect_ranks",
    "known",
]
SHORTCUTS = ("comm.native", "comm.all_gather_object", "comm.allocate", "comm.split")
# where the answers are, besides `judges`, `judges_cost`, ...
NEVER = ("checks", "solution", "minidist.course", "minidist.lessons")
# Groups of modules for `not_from`: pages of the book, and the folders behind them.
COLLECTIVES = ("minidist.ring", "minidist.collectives", "minidist.full.collectives")
STRATEGIES = (
    *(f"minidist.{page}" for page in ("ddp", "zero", "fsdp", "tensor", "pipeline")),
    *(f"minidist.{page}" for page in ("context", "expert", "slow_wires")),
    *(f"minidist.full.{name}" for name in ("ddp", "zero", "fsdp", "tensor", "pipeline")),
    *(f"minidist.full.{name}" for name in ("context", "expert", "slow_wires", "gradients")),
    *(f"minidist.full.{name}" for name in ("adjoint", "apply", "clip", "data_axis", "exports")),
    *(f"minidist.full.{name}" for name in ("layers", "meta", "optimizer", "placement")),
    *(f"minidist.full.{name}" for name in ("recipe", "replica", "strategy")),
    "minidist.further",
)
MEMORY = (
    "minidist.recompute",
    "minidist.precision",
    *(f"minidist.full.{name}" for name in ("memory", "recompute", "precision", "adapters")),
)
TRAINER = (
    "minidist.train",
    "minidist.checkpoint",
    *(f"minidist.full.{name}" for name in ("trainer", "checkpoint", "data")),
)
# the communicator that an answer is given
GIVEN = ("minidist.course.grader.witness", "minidist.course.grader.watch")
# of an error inside the checks, after the answer has come back to them
UNUSABLE = "the check cannot use what {} ({}: {}): are type, shape and dtype those that the docstring says?"
BY_OPTIMIZERS = ("torch._dynamo",)  # imported by the first optimizer of a process


class Task(NamedTuple):
    """One task of an exercise, and what an answer may not lean on.

    `not_from` lists modules that the student's code may neither call nor send through; a folder
    such as `minidist.full.collectives` stands for all its modules. `may_use` lists the communicator's
    shortcuts that it may use: `SHORTCUTS` tell each rank what the others hold without a message
    that counts, so an answer may use one only if its text offers it. (Collectives may call them for
    their own ends, all but `comm.native`.) `imports` lists what an answer makes torch import: it is
    imported before, since that takes seconds while calls are watched. `splits` is how often a rank
    may call `comm.split`, if at all: a rank is told without a message who else has its color, so
    many splits would carry data.
    """

    number: int
    title: str
    not_from: tuple[str, ...] = ()
    may_use: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    splits: int = 4


class Case(NamedTuple):
    """One run: what each rank is given, by rank, and a label that says what is special about it."""

    given: tuple[Arrays, ...]
    label: str

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.given)


class Note(NamedTuple):
    """What the witness or the watch saw: a message of a rank, the use of a shortcut, or a call that
    the task bars.

    Attributes
    ----------
    rank : int
        Who sent it, as numbered in the world; -1 of what is no message.
    kind : str
        `send`, `barrier` (the empty messages of one), `native`, `all_gather_object`, `allocate`, `split`,
        `call`, `text` (code of a barred module that runs elsewhere), or `hides` (a call of what
        hides calls or messages).
    to, bytes : int
        The receiver, as numbered in the world, and the size, of a `send`.
    through : tuple[str, ...]
        The package's modules between the student's file and the message, innermost first; of a
        `call`, the module called.
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
    """Some points of one task: `draw` makes the cases from the seed, and each is worth an equal
    part.
    """

    task: Task
    title: str
    points: float
    draw: Draw
    program: Program
    judge: Judge
    hidden: bool = False
    wire: str = "threads"


def sent_by(rank: int, notes: Sequence[Note]) -> list[Note]:
    """Return the messages that a rank sent, in order, those of barriers left out."""
    return [note for note in notes if note.rank == rank and note.kind == "send"]


def expect_dtype(rank: int, name: str, found: Array, expected: Array) -> None:
    """Raise `Wrong` unless an array has the dtype of what was given."""
    if found.dtype != expected.dtype:
        raise Wrong(
            f"rank {rank}: {name} is of {found.dtype}, expected {expected.dtype}, as what was given"
        )


@contextmanager
def untouched(**arguments: Any) -> Iterator[None]:
    """Raise `Wrong` if an answer changes one of its arguments, which are arrays or tensors."""
    before = {
        name: values.copy() if isinstance(values, np.ndarray) else values.detach().clone()
        for name, values in arguments.items()
    }
    yield
    for name, values in arguments.items():
        if isinstance(values, np.ndarray):
            same = values.tobytes() == before[name].tobytes()  # a NaN is no other value than itself
        else:
            same = values.equal(before[name])
        if not same:
            raise Wrong(
                f"{name} has other values after the call: compute on a copy, since the caller, or "
                "its backward, still needs the argument as it was"
            )


def awaited(trace: Trace | None) -> list[int]:
    """Return how many sends, and how many receives, a rank has waited for: what `expect_orderly`
    takes.
    """
    events = trace.events if trace else []
    return [sum(event.kind == kind for event in events) for kind in ("send", "recv")]


def expect_orderly(ranks: int, found: Sequence[Array], notes: Sequence[Note]) -> None:
    """Raise `Wrong` unless each rank waited for every message that it sent or was sent, and none
    called a barrier.

    Parameters
    ----------
    found : sequence of arrays
        By rank what `awaited` says of a trace that was begun before the first message.
    """
    rule = "isend and irecv end with request.wait(), and until then the buffer must not be used"
    for rank in range(ranks):
        coming = [note for note in notes if note.kind == "send" and note.to == rank]
        for verb, posted, waited in zip(
            ("sent", "was sent"), (sent_by(rank, notes), coming), found[rank], strict=True
        ):
            if waited < len(posted):
                raise Wrong(
                    f"rank {rank} {verb} {len(posted)} messages and waited for {waited} of them: "
                    f"{rule}"
                )
    if note := next((note for note in notes if note.kind == "barrier"), None):
        raise Wrong(
            f"rank {note.rank} calls comm.barrier ({note.line}), which sends messages that nobody "
            "needs here"
        )


def barred(task: Task, name: str) -> bool:
    """Tell whether a task bars a module, or a shortcut as `comm.native`."""
    if name in SHORTCUTS:
        return name not in task.may_use
    if name.partition("_")[0] == "judges":
        return True
    return name not in GIVEN and any(
        name == each or name.startswith(each + ".") for each in (*NEVER, *task.not_from)
    )


def leaning(task: Task, notes: Sequence[Note], ranks: int = 1) -> str:
    """Return the sentence that tells why the task is lost, if it was not built by hand; else
    nothing.
    """
    verbs = {"send": "sends through", "barrier": "sends through", "call": "calls", "hides": "calls"}
    verbs["text"] = "runs the code of"
    for note in notes:
        where = note.line or f"rank {note.rank}"
        if note.kind == "hides":
            return (
                f"task {task.number} cannot be graded: {where} calls {note.through[0]}, which "
                "hides calls or messages"
            )
        own = (f"comm.{note.kind}",) if by_hand(note) else ()
        names = note.through if note.kind in verbs else own
        for name in names:
            if barred(task, name):
                said = (
                    f"task {task.number} is to be built by hand, but {where} "
                    f"{verbs.get(note.kind, 'uses')} {name}"
                )
                return said + (
                    ", which tells ranks more than their messages do" if name in SHORTCUTS else ""
                )
    splits = [note for note in notes if note.kind == "split" and by_hand(note)]
    if len(splits) > task.splits * ranks:
        says = f"{len(splits)} calls of comm.split on {ranks} ranks"
        says += f", expected {task.splits} on each at most"
        why = "who else has a rank's color is told without a message, so colors must carry no data"
        return (
            f"task {task.number} is to be built by hand, but {splits[-1].line} makes {says}: {why}"
        )
    return ""


def by_hand(note: Note) -> bool:
    """Tell whether the answer itself used a shortcut, and not a part of the package that it
    called.
    """
    return note.kind == "native" or all(
        name.startswith("minidist.full.comm") for name in note.through
    )
