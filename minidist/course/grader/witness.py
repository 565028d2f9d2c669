"""A wire that notes every message and passes it on.

    exercise.py ─▶ comm.exchange(...) ─▶ Witness.exchange: who sent this? ─▶ the real wire

The answer's `Communicator` stands on the witness, so every message is seen: those of `exchange`,
those from inside a collective, those on a communicator that was split or forked. Calls that send
nothing are seen by `watch.py`.
"""

import sys
from collections.abc import Callable
from typing import Any

from minidist.course.grader.contract import Note
from minidist.course.grader.watch import Watch
from minidist.full.comm.buffers import Array
from minidist.full.comm.ledger import Status
from minidist.full.comm.wire import (
    Request,
    Wire,
    WireAround,
)

SHORTCUTS = ("all_gather_object", "allocate", "split")  # what carries data past the messages
MESSAGES = ("isend", "exchange")


class Witness(WireAround):
    """The wire `inner`, with a note of each message handed to `note`."""

    def __init__(
        self,
        inner: Wire,
        note: Callable[[Note], None],
        watch: Watch,
    ) -> None:
        super().__init__(inner)
        self._note, self._watch = note, watch
        for kind in SHORTCUTS:
            watch.shortcuts[id(getattr(Witness, kind).__code__)] = kind
        watch.shortcuts[id(vars(WireAround)["native"].fget.__code__)] = "native"
        watch.carriers.update((*SHORTCUTS, "native"))
        for name in (*SHORTCUTS, *MESSAGES):
            code = getattr(type(inner), name).__code__
            watch.below[id(code)] = name if name in SHORTCUTS else "hides"
            watch.carriers.add(code.co_name)

    def _see(self, to: int, bytes: int) -> None:
        through, line, barrier, _ = self._watch.stack(sys._getframe(2))
        kind = "barrier" if barrier else "send"
        self._note(Note(self.members[self.rank], kind, self.members[to], bytes, through, line))

    def isend(self, array: Array, to: int, tag: int) -> Request:
        self._see(to, array.nbytes)
        return self.inner.isend(array, to, tag)

    def exchange(
        self,
        leaving: Array,
        to: int,
        arriving: Array,
        source: int,
        tag: int,
    ) -> None:
        self._see(to, leaving.nbytes)
        self.inner.exchange(leaving, to, arriving, source, tag)

    # The methods below call the inner wire from this file, so that the watch knows the witness as
    # the caller.

    def all_gather_object(self, answer: Any) -> list[Any]:
        return super().all_gather_object(answer)

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        return super().allocate(bytes, for_torch)

    def fence(self, status: Status) -> bool:
        return super().fence(status)

    def split(self, color: int, key: int, name: str) -> "Witness":
        return Witness(self.inner.split(color, key, name), self._note, self._watch)

    def fork(self, name: str) -> "Witness":
        return Witness(self.inner.fork(name), self._note, self._watch)
