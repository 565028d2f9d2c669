"""What one thread of one rank did on its communicators: what it sent, what it waits for, what is to
be recorded.

`Communicator` counts here what is sent (`isend`, `exchange`, `reach`), whatever the wire; waits are
noted by it and by `request.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from minidist import comm as book
from minidist.full.comm.report import label
from minidist.full.trace import Trace
from minidist.full.trace.events import EventKind


class Traffic(book.Traffic):
    """What one rank sent through one communicator, and through all that were split or forked from
    it: `messages`, `bytes`, and more than the book counts.

    What an engine's own collectives send (MPI's, gloo's, NCCL's) is their secret. It is in
    `engine_bytes`, as what the rank had to send at least, by formula (see `choose.LEAST`), and not
    in `messages` and `bytes`. `seconds` is the time in which the rank's own thread was
    busy with communication, waiting included. What a fork's thread does meanwhile is not in it:
    that is the point of a fork.
    """

    def __init__(self, origin: Traffic | None = None, *, other_thread: bool = False) -> None:
        super().__init__()
        self.engine_bytes = 0
        self.seconds = 0.0
        self._origin, self._other_thread = origin, other_thread
        self._lock = threading.Lock()

    def sent(self, messages: int, bytes: int, engine_bytes: int = 0) -> None:
        """Count messages here and in every communicator this one came from, or what an engine had
        to send.
        """
        with self._lock:  # a fork's thread counts too
            self.messages += messages
            self.bytes += bytes
            self.engine_bytes += engine_bytes
        if self._origin is not None:
            self._origin.sent(messages, bytes, engine_bytes)

    def waited(self, seconds: float) -> None:
        """Count time in the same way, but only this thread's own."""
        self.seconds += seconds
        if self._origin is not None and not self._other_thread:
            self._origin.waited(seconds)


# not frozen: one is made for each message, and a frozen one takes three times as long
@dataclass(slots=True)
class Awaited:
    """What a thread waits for: a message of `bytes`, or with `tag` None, that others come to the
    same call.

    With no `ranks` it is another thread of this rank, which says itself whom it waits for, if it
    does.

    In words, `receive from rank 1 (tag 0, 64 bytes)`.

    Attributes
    ----------
    what : str
        `send to`, `receive from`, ..., or the name of the call.
    ranks : tuple[int, ...]
        World ranks that must act before this wait ends. A rank that has already finished never
        will.
    """

    what: str
    ranks: tuple[int, ...]
    tag: int | None = None
    bytes: int = 0

    def __str__(self) -> str:
        if not self.ranks:
            return self.what
        if self.tag is None:
            return f"all ranks to come to {self.what}"
        return f"{self.what} rank {self.ranks[0]} ({label(self.tag)}, {self.bytes} bytes)"


class Status:
    """What one thread of one rank is waiting for: reports of hanging programs read it.

    To a fence it `brings` so many bytes, as all others must.

    On a stream's thread `line` is the line of the program that launched what it does now, as far as
    somebody records it; nobody else's line is on its stack.
    """

    def __init__(self) -> None:
        self.waiting: Awaited | None = None
        self.line, self.brings = "", 0
        # when it began to wait, and when its watchdog asked the others
        self.since = self.asked = 0.0
        self.thread = threading.get_ident()

    @contextmanager
    def awaiting(self, awaited: Awaited, now: float) -> Iterator[None]:
        """Have reports say during the body what this thread waits for, unless it waits already."""
        before = self.waiting
        if before is None:
            self.since, self.waiting = now, awaited
        try:
            yield
        finally:
            self.waiting = before


@dataclass
class Ledger:
    """The accounts of one communicator.

    Attributes
    ----------
    trace : Trace or None
        Where events are recorded.
    debug : bool
        Whether the ranks compare what they call before they begin.
    track : str
        The thread's name in a trace.
    traffic : Traffic
        Messages and bytes that this rank sent.
    status : Status
        What the thread that uses the communicator waits for.
    statuses : WeakValueDictionary
        Those of all threads of the rank, the main one's first. A fork's is dropped when nothing
        can wait on the fork any more.
    flows : Counter
        Messages so far by (sender, receiver, tag), from which a message gets its name in a trace.
    mark : callable or None
        Makes a context that shows its body to a profiler, by name, or None if no profiler is there.
    dropped : list
        Messages under way whose requests the program has dropped. The watchdog sees them through.
    """

    trace: Trace | None = None
    debug: bool = False
    track: str = "main"
    traffic: Traffic = field(default_factory=Traffic)
    status: Status = field(default_factory=Status)
    statuses: weakref.WeakValueDictionary[int, Status] = field(
        default_factory=weakref.WeakValueDictionary
    )
    flows: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    mark: Callable[[str], AbstractContextManager[Any] | None] | None = None
    dropped: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.statuses[id(self.status)] = self.status

    def of_group(self) -> Ledger:
        """Return a ledger for another communicator of the same thread; its traffic counts here
        too.
        """
        return replace(self, traffic=Traffic(self.traffic), flows=Counter())

    def of_fork(self, track: str) -> Ledger:
        """Return a ledger for a communicator of another thread; its traffic counts here too."""
        traffic = Traffic(self.traffic, other_thread=True)
        return replace(self, track=track, traffic=traffic, status=Status(), flows=Counter())


class Ranks(Protocol):
    """What its parts, such as a message or a stream, ask of a `Communicator`."""

    rank: int
    size: int
    members: tuple[int, ...]
    name: str
    tag_offset: int
    ledger: Ledger

    def clock(self) -> float: ...

    def advance(self, seconds: float) -> None: ...

    def span(self, name: str, kind: EventKind) -> AbstractContextManager[None]: ...

    def fork(self) -> Any: ...

    def all_gather_object(self, answer: Any) -> list[Any]: ...

    def wait_until(self, ready: Callable[[], bool], what: str, idle: bool = False) -> None: ...

    def wake(self, blocking: bool = True) -> None: ...

    def start(self, work: Callable[[], None], name: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...
