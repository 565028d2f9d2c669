"""A message under way, a piece of work under way: what is entered in the ledger when they end."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minidist.full.comm.buffers import Array
from minidist.full.comm.ledger import Awaited, Ranks
from minidist.full.comm.wire import Request
from minidist.full.trace.events import (
    COLLECTIVE,
    COMPUTE,
    RECEIVE,
    SEND,
    Event,
    EventKind,
)
from minidist.full.trace.lines import source_line


class Pending:
    """A message under way, as users hold it. It may be waited for more than once."""

    def __init__(
        self, comm: Ranks, kind: EventKind, array: Array, peer: int, tag: int, request: Request
    ):
        self.comm, self.kind, self.array, self.peer, self.tag = comm, kind, array, peer, tag
        self.request: Request | None = request
        self.awaited = False
        self.posted = comm.clock()
        self.flow = "" if comm.ledger.trace is None else name_flow(comm, kind, peer, tag)

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or changed (send)."""
        if self.request is not None:
            self.awaited = True
            verb = "send to" if self.kind is SEND else "receive from"
            peer, tag = self.comm.members[self.peer], self.tag + self.comm.tag_offset
            awaited = Awaited(verb, (peer,), tag, self.array.nbytes)
            self._finish(waited_from=wait(self.comm, awaited, self.request.wait))

    def test(self) -> bool:
        """Tell, without waiting, whether the message is through."""
        if self.request is not None and self.request.test():
            self._finish(waited_from=self.comm.clock())
        return self.request is None

    def __del__(self) -> None:
        """Keep a message that is dropped under way, as its library still uses the buffer. Warn, but
        for one that was waited for: then the program has heard an error.
        """
        if self.request is None or sys.is_finalizing() or self.request.drop():
            return
        members, ledger = self.comm.members, self.comm.ledger
        ledger.dropped.append(self.request)
        if self.awaited:
            return
        warnings.warn(
            f"rank {members[self.comm.rank]} drops the request of a message under way ({self.kind}, "
            f"rank {members[self.peer]} at the other end, tag {self.tag}, {self.array.nbytes} bytes): "
            "keep it and call its wait(), which alone says when the buffer may be used again",
            RuntimeWarning,
            stacklevel=2,
        )

    def _finish(self, waited_from: float) -> None:
        self.request = None
        if self.comm.ledger.trace is not None:
            end = self.peer, self.flow, self.array.nbytes, self.posted, waited_from
            record_end(self.comm, self.kind, *end)


def post(
    comm: Ranks,
    start: Callable[[Array, int, int], Request],
    kind: EventKind,
    array: Array,
    peer: int,
    tag: int,
) -> Pending:
    """Have a wire `start` a message that was checked and counted."""
    return Pending(comm, kind, array, peer, tag, start(array, peer, tag + comm.tag_offset))


def awaited_exchange(comm: Ranks, arriving: Array, source: int, tag: int) -> Awaited:
    """Return what a rank waits for in an exchange."""
    tag += comm.tag_offset
    return Awaited("exchange, receiving from", (comm.members[source],), tag, arriving.nbytes)


def exchange(
    comm: Ranks,
    carry: Callable[..., None],
    awaited: Awaited,
    leaving: Array,
    to: int,
    arriving: Array,
    source: int,
    tag: int,
) -> None:
    """Have a wire `carry` both messages of an exchange that was checked and counted."""
    status = comm.ledger.status
    # As in `wait`, written out: a ring of small messages does little else.
    started = status.since = comm.clock()
    status.waiting = awaited
    try:
        carry(leaving, to, arriving, source, tag + comm.tag_offset)
    finally:
        status.waiting = None
    if comm.ledger.trace is not None:
        for kind, peer, array in ((SEND, to, leaving), (RECEIVE, source, arriving)):
            flow = name_flow(comm, kind, peer, tag)
            record_end(comm, kind, peer, flow, array.nbytes, started)
    if not comm.tag_offset:
        comm.ledger.traffic.waited(comm.clock() - started)


def wait(comm: Ranks, awaited: Awaited, block: Callable[..., None], *message: Any) -> float:
    """Call `block(*message)`, and note meanwhile what this rank waits for; return when it began
    to.
    """
    status = comm.ledger.status
    started = status.since = comm.clock()
    status.waiting = awaited
    try:
        block(*message)
    finally:
        status.waiting = None
    if not comm.tag_offset:
        comm.ledger.traffic.waited(comm.clock() - started)
    return started


def name_flow(comm: Ranks, kind: EventKind, peer: int, tag: int) -> str:
    """Name a message when it is posted. Both ends count alike, so both find the same name without
    asking.
    """
    ends = (comm.rank, peer) if kind == SEND else (peer, comm.rank)
    key = (*ends, tag + comm.tag_offset)
    comm.ledger.flows[key] += 1
    return f"{comm.name}:{ends[0]}>{ends[1]}:{key[2]}:{comm.ledger.flows[key]}"


def record_end(
    comm: Ranks,
    kind: EventKind,
    peer: int,
    flow: str,
    bytes: int,
    posted: float,
    waited_from: float | None = None,
) -> None:
    """Record one end of a message."""
    name = f"{kind} {'to' if kind == SEND else 'from'} {comm.members[peer]}"
    record(comm, kind, name, posted, bytes, flow=flow, waited_from=waited_from)


def record(
    comm: Ranks, kind: EventKind, name: str, started: float, bytes: int, **more: Any
) -> None:
    """Record an event that ends now, if anybody listens."""
    ledger = comm.ledger
    if ledger.trace is not None:
        line = "" if kind == COMPUTE else ledger.status.line or source_line()
        event = (comm.members[comm.rank], kind, name, started, comm.clock(), bytes, ledger.track)
        ledger.trace.record(Event(*event, line=line, **more))


@dataclass
class Span:
    """A context around a piece of work: it records one event, and counts time if the work is
    communication.

    With `engine_bytes`, the least that this rank has to send, the span is one blocking call into
    MPI or NCCL and records the wait itself. With None, each message inside records its own wait.
    """

    comm: Ranks
    name: str
    kind: EventKind
    bytes: int
    engine_bytes: int | None = None

    def __enter__(self) -> None:
        self.marked = mark(self.name) if (mark := self.comm.ledger.mark) else None
        if self.marked is not None:
            self.marked.__enter__()
        self.started = self.comm.clock()
        if self.engine_bytes is not None:
            status = self.comm.ledger.status
            status.since, status.waiting = self.started, Awaited(self.name, self.comm.members)

    def __exit__(self, error: object, *_: object) -> None:
        comm, ledger = self.comm, self.comm.ledger
        if self.marked is not None:
            self.marked.__exit__(None, None, None)
        if self.engine_bytes is not None:
            ledger.status.waiting = None
            if error is None:
                ledger.traffic.sent(0, 0, self.engine_bytes)
        if self.kind != COMPUTE:
            ledger.traffic.waited(comm.clock() - self.started)
        if self.kind == COLLECTIVE and comm.size == 1:
            return  # on one rank a collective sends nothing, and a trace shows none
        sent = self.engine_bytes or 0
        record(comm, self.kind, self.name, self.started, self.bytes, engine_bytes=sent)
