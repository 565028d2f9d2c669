"""A wire that notes every message and passes it on.

    exercise.py ─▶ comm.exchange(...) ─▶ Witness._exchange: who sent this? ─▶ the real wire

What users call is written once, in `Communicator`, on top of a few underscored methods. The witness supplies just
those, so nothing that is sent through it goes unseen: neither by `exchange`, nor from inside a collective, nor on a
communicator that was split or forked from it. Calls that send nothing are seen by `watch_calls`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from minidist.comm.communicator import Communicator
from minidist.grade.contract import Note, Task, barred

if TYPE_CHECKING:
    from minidist.comm.buffers import Array
    from minidist.comm.request import Request
    from minidist.comm.stream import Stream

PACKAGE = Path(__file__).parents[1]


class Witness(Communicator):
    """The communicator `inner`, with a note of each message and each shortcut handed to `note`."""

    def __init__(
        self, inner: Communicator, note: Callable[[Note], None], exercise: str, origin: Witness | None = None
    ) -> None:
        super().__init__(inner.rank, inner.members, inner.name, origin or inner)
        self.wire = inner.wire
        self._inner, self._note, self._exercise = inner, note, exercise

    def _see(self, kind: str, to: int = -1, bytes: int = 0) -> None:
        through, line, barrier = stack(sys._getframe(2), self._exercise)
        kind = "barrier" if kind == "send" and barrier else kind
        to = self.members[to] if to >= 0 else to
        self._note(Note(self.members[self.rank], kind, to, bytes, through, line))

    # ---------------------------------------------------------------- messages

    def _isend(self, array: Array, to: int, tag: int) -> Request:
        self._see("send", to, array.nbytes)
        return self._inner._isend(array, to, tag)

    def _irecv(self, array: Array, source: int, tag: int) -> Request:
        return self._inner._irecv(array, source, tag)

    def _exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        self._see("send", to, leaving.nbytes)
        self._inner._exchange(leaving, to, arriving, source, tag)

    # ---------------------------------------------------------------- shortcuts

    @property
    def native(self) -> Any:
        self._see("native")
        return self._inner.native

    def roll_call(self, answer: Any) -> list[Any]:
        self._see("roll_call")
        return self._inner.roll_call(answer)

    def _allocate(self, bytes: int) -> tuple[Any, list[Any]]:
        self._see("allocate")
        return self._inner._allocate(bytes)

    # ---------------------------------------------------------------- the rest is the real wire's

    def _split(self, color: int, key: int, name: str) -> Communicator:
        return Witness(self._inner._split(color, key, name), self._note, self._exercise, self)

    def _fork(self, name: str) -> Communicator:
        return Witness(self._inner._fork(name), self._note, self._exercise, self)

    @property
    def node(self) -> tuple[int, ...]:
        return self._inner.node

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        return self._inner.nodes

    def stream(self) -> Stream:
        return super().stream()  # whose messages are ours, where the wire's own stream would pass the witness by

    def fence(self) -> None:
        self._inner.fence()

    def clock(self) -> float:
        return self._inner.clock()

    def advance(self, seconds: float) -> None:
        self._inner.advance(seconds)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        self._inner.wait_until(ready, what)

    def wake(self, blocking: bool = True) -> None:
        self._inner.wake(blocking)

    def fail(self, error: BaseException) -> None:
        self._inner.fail(error)


def watch_calls(task: Task, rank: int, note: Callable[[Note], None], exercise: str) -> Callable[..., None]:
    """Return a function for `sys.setprofile` that notes calls from the exercise into modules that the task bars."""
    known: dict[str, bool] = {}
    noted: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if name not in known:
            known[name] = barred(task, name)
        if known[name] and (line := stack(frame, exercise)[1]) and (name, line) not in noted:
            noted.add((name, line))
            note(Note(rank, "call", through=(name,), line=line))

    return profile


def stack(frame: FrameType | None, exercise: str) -> tuple[tuple[str, ...], str, bool]:
    """Return (the package's modules that a call came through, the exercise's line, whether it is a barrier's)."""
    through: dict[str, None] = {}
    line, barrier = "", False
    while frame is not None:
        code = frame.f_code
        if code is Communicator.barrier.__code__:
            barrier = True
        if code.co_filename.startswith(str(PACKAGE)):
            through.setdefault(".".join(Path(code.co_filename).relative_to(PACKAGE.parent).with_suffix("").parts))
        elif code.co_filename == exercise and not line:
            line = f"{Path(exercise).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return tuple(through), line, barrier
