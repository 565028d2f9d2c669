"""A message under way, and the counting that goes with it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from minidist.trace.events import Event

if TYPE_CHECKING:
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator


class Request(Protocol):
    """A message under way, as a wire hands it back."""

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or written (send) again."""

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""


class Pending:
    """A message under way. `wait` and `test` as on `Request`; a request may be waited for more than once."""

    def __init__(self, comm: Communicator, kind: str, array: Array, peer: int, tag: int, request: Request):
        self.comm, self.kind, self.array, self.peer, self.tag = comm, kind, array, peer, tag
        self.request: Request | None = request
        self.posted = comm.clock()
        self.flow = "" if comm.trace is None else comm._flow(kind, peer, tag)

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or changed (send)."""
        if self.request is None:
            return
        comm, status = self.comm, self.comm.status
        started = status.since = comm.clock()
        status.waiting = (self.kind, comm.members[self.peer], self.tag + comm._tag_offset, self.array.nbytes)
        try:
            self.request.wait()
        finally:
            status.waiting = None
        self._finish(waited_from=started)
        if not comm._tag_offset:
            comm.traffic.waited(comm.clock() - started)

    def test(self) -> bool:
        """Tell, without waiting, whether the message is through."""
        if self.request is not None and self.request.test():
            self._finish(waited_from=self.comm.clock())
        return self.request is None

    def _finish(self, waited_from: float) -> None:
        self.request = None
        if self.comm.trace is not None:
            self.comm._trace_message(self.kind, self.peer, self.flow, self.array.nbytes, self.posted, waited_from)


class Span:
    """Context around a piece of work: one event, and time counted as communication where it is."""

    __slots__ = ("bytes", "comm", "kind", "name", "native", "started")  # one is made in every collective

    def __init__(self, comm: Communicator, name: str, kind: str, bytes: int):
        self.comm, self.name, self.kind, self.bytes = comm, name, kind, bytes
        self.native = kind == "collective" and name.endswith(" native")

    def __enter__(self) -> None:
        self.started = self.comm.clock()
        if self.native:  # other collectives wait for messages, each of which says so itself
            self.comm.status.meet(self.name, self.comm, self.started)

    def __exit__(self, *_: object) -> None:
        ended = self.comm.clock()
        if self.native:
            self.comm.status.waiting = None
        if self.kind != "compute":
            self.comm.traffic.waited(ended - self.started)
        alone = (
            self.kind == "collective" and self.comm.size == 1
        )  # then nothing is sent, and a trace shows no collective
        if self.comm.trace is not None and not alone:
            event = Event(
                self.comm.members[self.comm.rank],
                self.kind,
                self.name,
                self.started,
                ended,
                self.bytes,
                self.comm.track,
            )
            self.comm.trace.record(event)


class Traffic:
    """What one rank sent through one communicator, and through all that were split or forked from it.

    `seconds` is the time in which the rank's own thread was busy with communication, waiting included. What a fork's
    thread does meanwhile is not in it: that is the point of a fork.
    """

    def __init__(self, origin: Traffic | None = None, *, other_thread: bool = False) -> None:
        self.messages_sent = 0
        self.bytes_sent = 0
        self.seconds = 0.0
        self._origin, self._other_thread = origin, other_thread
        self._lock = threading.Lock()

    def sent(self, messages: int, bytes: int) -> None:
        """Count messages here and in every communicator this one came from."""
        with self._lock:  # a fork's thread counts too
            self.messages_sent += messages
            self.bytes_sent += bytes
        if self._origin is not None:
            self._origin.sent(messages, bytes)

    def waited(self, seconds: float) -> None:
        """Count time, likewise, as far as it is this thread's."""
        self.seconds += seconds
        if self._origin is not None and not self._other_thread:
            self._origin.waited(seconds)


class Status:
    """What one thread of one rank is waiting for, in words: reports of hanging programs read it."""

    def __init__(self) -> None:
        self.waiting: tuple[str, int, int, int] | None = None  # kind, peer (world rank), tag, bytes
        self.group: tuple[int, ...] = ()  # the world ranks that must all come, if the peer is this rank itself
        self.since = self.asked = 0.0  # when it began to wait, and when its watchdog asked the others
        self.thread = threading.get_ident()

    def meet(self, what: str, comm: Communicator, since: float, group: tuple[int, ...] = ()) -> None:
        """Note that this thread waits for others to come to the same call. Who of `group` has finished never will."""
        self.since, self.group = since, group
        self.waiting = (what, comm.members[comm.rank], 0, 0)

    @contextmanager
    def meeting(self, what: str, comm: Communicator) -> Iterator[None]:
        """Note for the time of the body that this thread waits for all ranks of `comm`, unless it does so already."""
        before = self.waiting
        if before is None:
            self.meet(what, comm, comm.clock(), comm.members)
        try:
            yield
        finally:
            self.waiting = before


Statuses: TypeAlias = "weakref.WeakValueDictionary[int, Status]"
"""Of all threads of a rank, the main one's first; a fork's goes with the last who could wait on it."""
