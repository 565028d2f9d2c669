"""A wire that notes every message and passes it on.

    exercise.py ─▶ comm.exchange(...) ─▶ Witness._exchange: who sent this? ─▶ the real wire

What users call is written once, in `Communicator`, on top of a few underscored methods. The witness supplies just
those, so nothing that is sent through it goes unseen: neither by `exchange`, nor from inside a collective, nor on a
communicator that was split or forked from it. Calls that send nothing are seen by `watch.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minidist.comm.communicator import Communicator
from minidist.course.grader.contract import Note

if TYPE_CHECKING:
    from minidist.comm.buffers import Array
    from minidist.comm.request import Request
    from minidist.comm.stream import Stream
    from minidist.course.grader.watch import Watch

SHORTCUTS = {"roll_call": "roll_call", "allocate": "_allocate", "split": "_split"}  # and by which method


class Witness(Communicator):
    """The communicator `inner`, with a note of each message handed to `note`."""

    def __init__(
        self, inner: Communicator, note: Callable[[Note], None], watch: Watch, origin: Witness | None = None
    ) -> None:
        super().__init__(inner.rank, inner.members, inner.name, origin or inner)
        self.wire = inner.wire
        self._inner, self._note, self._watch = inner, note, watch
        for kind, name in SHORTCUTS.items():
            watch.look_at(getattr(Witness, name).__code__, kind, watch.shortcuts)
            watch.look_at(getattr(type(inner), name).__code__, kind, watch.below)
        watch.look_at(vars(Witness)["native"].fget.__code__, "native", watch.shortcuts)

    def _see(self, to: int, bytes: int) -> None:
        through, line, barrier, _ = self._watch.stack(sys._getframe(2))
        kind = "barrier" if barrier else "send"
        self._note(Note(self.members[self.rank], kind, self.members[to], bytes, through, line))

    # ---------------------------------------------------------------- messages

    def _isend(self, array: Array, to: int, tag: int) -> Request:
        self._see(to, array.nbytes)
        return self._inner._isend(array, to, tag)

    def _irecv(self, array: Array, source: int, tag: int) -> Request:
        return self._inner._irecv(array, source, tag)

    def _exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        self._see(to, leaving.nbytes)
        self._inner._exchange(leaving, to, arriving, source, tag)

    # ---------------------------------------------------------------- shortcuts, which the watch sees

    @property
    def native(self) -> Any:
        return self._inner.native

    def roll_call(self, answer: Any) -> list[Any]:
        return self._inner.roll_call(answer)

    def _allocate(self, bytes: int) -> tuple[Any, list[Any]]:
        return self._inner._allocate(bytes)

    # ---------------------------------------------------------------- the rest is the real wire's

    def _split(self, color: int, key: int, name: str) -> Communicator:
        return Witness(self._inner._split(color, key, name), self._note, self._watch, self)

    def _fork(self, name: str) -> Communicator:
        return Witness(self._inner._fork(name), self._note, self._watch, self)

    @property
    def node(self) -> tuple[int, ...]:
        return self._inner.node

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        return self._inner.nodes

    def stream(self) -> Stream[Communicator]:
        return super().stream()  # whose messages are ours, where the wire's own stream would pass the witness by

    def fence(self) -> None:
        self._inner.fence()

    def clock(self) -> float:
        return self._inner.clock()

    def advance(self, seconds: float) -> None:
        self._inner.advance(seconds)

    def wait_until(self, ready: Callable[[], bool], what: str, idle: bool = False) -> None:
        self._inner.wait_until(ready, what, idle)

    def wake(self, blocking: bool = True) -> None:
        self._inner.wake(blocking)

    def fail(self, error: BaseException) -> None:
        self._inner.fail(error)
