"""A message under way, and the counting that goes with it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from minidist.comm.report import describe
from minidist.trace.events import Event, source_line

if TYPE_CHECKING:
    from minidist.comm.buffers import Array
    from minidist.trace import Trace


VERBS = {"send": "send to", "recv": "receive from"}


class Accounts(Protocol):
    """One rank's accounts, which messages and spans are entered in; a `Communicator`."""

    rank: int
    size: int
    members: tuple[int, ...]
    name: str
    track: str
    trace: Trace | None
    traffic: Traffic
    status: Status
    tag_offset: int
    flows: Counter[tuple[int, int, int]]

    def clock(self) -> float: ...


class Request(Protocol):
    """A message under way, as a wire hands it back."""

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or written (send) again."""

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""


class Pending:
    """A message under way. `wait` and `test` as on `Request`; a request may be waited for more than once."""

    def __init__(self, comm: Accounts, kind: str, array: Array, peer: int, tag: int, request: Request):
        self.comm, self.kind, self.array, self.peer, self.tag = comm, kind, array, peer, tag
        self.request: Request | None = request
        self.posted = comm.clock()
        self.flow = "" if comm.trace is None else name_flow(comm, kind, peer, tag)

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or changed (send)."""
        if self.request is None:
            return
        comm, status = self.comm, self.comm.status
        started = status.since = comm.clock()
        verb, tag = VERBS[self.kind], self.tag + comm.tag_offset
        status.waiting = Awaited(verb, (comm.members[self.peer],), tag, self.array.nbytes)
        try:
            self.request.wait()
        finally:
            status.waiting = None
        self._finish(waited_from=started)
        if not comm.tag_offset:
            comm.traffic.waited(comm.clock() - started)

    def test(self) -> bool:
        """Tell, without waiting, whether the message is through."""
        if self.request is not None and self.request.test():
            self._finish(waited_from=self.comm.clock())
        return self.request is None

    def _finish(self, waited_from: float) -> None:
        self.request = None
        if self.comm.trace is not None:
            record_end(self.comm, self.kind, self.peer, self.flow, self.array.nbytes, self.posted, waited_from)


def name_flow(comm: Accounts, kind: str, peer: int, tag: int) -> str:
    """Name a message as it is posted. Both ends count alike, so they arrive at the same name unasked."""
    ends = (comm.rank, peer) if kind == "send" else (peer, comm.rank)
    key = (*ends, tag + comm.tag_offset)
    comm.flows[key] += 1
    return f"{comm.name}:{ends[0]}>{ends[1]}:{key[2]}:{comm.flows[key]}"


def record_end(
    comm: Accounts, kind: str, peer: int, flow: str, bytes: int, posted: float, waited_from: float | None = None
) -> None:
    """Record one end of a message."""
    assert comm.trace is not None
    rank, now = comm.members[comm.rank], comm.clock()
    name = f"{kind} {'to' if kind == 'send' else 'from'} {comm.members[peer]}"
    comm.trace.record(Event(rank, kind, name, posted, now, bytes, comm.track, flow, source_line(), waited_from))


class Span:
    """Context around a piece of work: one event, and time counted as communication where it is.

    In a `native` collective a rank waits for all others at once; in another one for messages, which say so themselves.
    """

    __slots__ = ("bytes", "comm", "kind", "name", "native", "started")  # one is made in every collective

    def __init__(self, comm: Accounts, name: str, kind: str, bytes: int, native: bool = False):
        self.comm, self.name, self.kind, self.bytes, self.native = comm, name, kind, bytes, native

    def __enter__(self) -> None:
        self.started = self.comm.clock()
        if self.native:
            self.comm.status.since, self.comm.status.waiting = self.started, Awaited(self.name, self.comm.members)

    def __exit__(self, *_: object) -> None:
        ended = self.comm.clock()
        if self.native:
            self.comm.status.waiting = None
        if self.kind != "compute":
            self.comm.traffic.waited(ended - self.started)
        alone = self.kind == "collective" and self.comm.size == 1  # nothing is sent, and a trace shows no collective
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


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a thread waits for: a message of `bytes`, or with `tag` None, that others come to the same call.

    Attributes
    ----------
    what : str
        `send to`, `receive from`, ..., or the name of the call.
    ranks : tuple[int, ...]
        Ranks of the world of whom each must do its part. Who of them has finished never will.
    """

    what: str
    ranks: tuple[int, ...]
    tag: int | None = None
    bytes: int = 0

    def __str__(self) -> str:
        if self.tag is None:
            return f"all ranks to come to {self.what}"
        return describe(self.what, self.ranks[0], self.tag, self.bytes)


class Status:
    """What one thread of one rank is waiting for: reports of hanging programs read it."""

    def __init__(self) -> None:
        self.waiting: Awaited | None = None
        self.since = self.asked = 0.0  # when it began to wait, and when its watchdog asked the others
        self.thread = threading.get_ident()

    @contextmanager
    def meeting(self, what: str, comm: Accounts) -> Iterator[None]:
        """Note for the time of the body that this thread waits for all ranks of `comm`, unless it does so already."""
        before = self.waiting
        if before is None:
            self.since, self.waiting = comm.clock(), Awaited(what, comm.members)
        try:
            yield
        finally:
            self.waiting = before


Statuses: TypeAlias = "weakref.WeakValueDictionary[int, Status]"
"""Of all threads of a rank, the main one's first; a fork's goes with the last who could wait on it."""
