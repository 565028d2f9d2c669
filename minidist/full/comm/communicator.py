"""The communicator of `minidist/comm.py` with checks, a ledger, streams and shared memory added.

    Communicator        the book's methods, and more: every page of the book takes one
      ├─ Wire           carries the messages: threads, MPI, torch.distributed (`wire.py`)
      └─ Ledger         counts and records them (`ledger.py`)

What users call is written here once, with its checks, its counting and its tracing.
"""

from __future__ import annotations

import copy as copying
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from minidist import comm as book
from minidist.full.comm.agree import agree, same_call
from minidist.full.comm.buffers import Array, Buffer, Nowhere, copy, dtype_of, flatten, shaped
from minidist.full.comm.errors import ranks_of, whole
from minidist.full.comm.ledger import Awaited, Ledger, Traffic
from minidist.full.comm.registered import Registered
from minidist.full.comm.report import TAGS
from minidist.full.comm.request import Pending, Span, awaited_exchange, exchange, post
from minidist.full.comm.stream import Stream
from minidist.full.comm.wire import Wire
from minidist.full.trace import Trace
from minidist.full.trace.events import (
    COLLECTIVE,
    COMPUTE,
    RECEIVE,
    SEND,
    EventKind,
)

Kept = TypeVar("Kept")
Computing = TypeVar("Computing", bound=Callable[..., Any])


class Communicator(book.Communicator):
    """A group of ranks that can send to each other. The one to read is `minidist.comm.Communicator`.

    Attributes
    ----------
    wire : Wire
        What carries the messages.
    ledger : Ledger
        What is counted and recorded.
    rank, size : int
        This rank's number, and how many there are.
    members : tuple[int, ...]
        The number of each rank in the world that the job was started with.
    traffic : Traffic
        Messages and bytes that this rank sent.
    clock : callable
        `clock()` returns seconds: the machine's, or on a modelled cluster the virtual time of this
        rank.
    start, wait_until, wake, fail : callable
        With the rank's other threads; see `Wire`.
    registered : Registered
        Memory that the other ranks of the node can read.
    """

    traffic: Traffic
    clock: Callable[[], float]

    def __init__(self, wire: Wire, ledger: Ledger) -> None:
        # a transport that is given flat arrays, and makes its groups by `split`
        self.transport: Any = wire
        self.wire, self.ledger, self.traffic = wire, ledger, ledger.traffic
        wire.debug = ledger.debug
        self.rank, self.size = wire.rank, wire.size
        self.members, self.name = wire.members, wire.name
        self.kept: dict[type, Any] = {}
        self.registered, self.tag_offset, self._children = Registered(), 0, itertools.count(1)
        self.clock, self.start, self.fail = wire.clock, wire.start, wire.fail
        self.wait_until, self.wake = wire.wait_until, wire.wake

    @property
    def trace(self) -> Trace | None:
        """Where events are recorded, if anywhere."""
        return self.ledger.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.ledger.trace = trace

    @property
    def debug(self) -> bool:
        """Whether the ranks compare what they call before they begin."""
        return self.ledger.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.ledger.debug = self.wire.debug = debug

    @property
    def native(self) -> Any:
        """The engine's own collectives, to compare with, or None."""
        return self.wire.native

    # ---------------------------------------------------------------- messages

    def isend(self, buffer: book.Buffer, to: int, tag: int = 0) -> Pending:
        """Start sending; leave the buffer unchanged until the returned request was waited for.

        Raises
        ------
        ValueError
            If `to` is not another rank, the tag is negative or too large, or the buffer is not
            contiguous.
        TypeError
            If it is not a buffer, of a dtype that does not travel, or a number is not whole.
        """
        array = self._checked(buffer, to, tag, "to")
        self.ledger.traffic.sent(1, array.nbytes)
        return post(self, self.wire.isend, SEND, array, to, tag)

    def irecv(self, buffer: book.Buffer, source: int, tag: int = 0) -> Pending:
        """Start receiving; the buffer is filled once the returned request was waited for."""
        array = self._checked(buffer, source, tag, "source")
        return post(self, self.wire.irecv, RECEIVE, array, source, tag)

    def exchange(
        self, out: book.Buffer, to: int, into: book.Buffer, source: int, tag: int = 0
    ) -> None:
        """Send `out` to one rank and receive `into` from one, both posted before either is waited
        for. Raises as `isend`.
        """
        leaving, arriving = self._checked_exchange(out, to, into, source, tag)
        self.ledger.traffic.sent(1, leaving.nbytes)
        awaited = awaited_exchange(self, arriving, source, tag)
        exchange(self, self.wire.exchange, awaited, leaving, to, arriving, source, tag)

    def barrier(self) -> None:
        """Return once every rank has called it.

        Dissemination (Hensgen, Finkel & Manber 1988): after round k a rank has heard, directly or
        not, from the 2^k ranks before it. ceil(log2 P) empty messages a rank.
        """
        nothing, nowhere = np.empty(0, np.uint8), np.empty(0, np.uint8)
        distance = 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.internal.exchange(nothing, to, nowhere, source)
            distance *= 2

    @cached_property
    def internal(self) -> Communicator:
        """The same ranks, on tags that users cannot name, so that a collective never receives a
        user's message.
        """
        if self.tag_offset:
            return self
        twin = copying.copy(self)
        twin.tag_offset = TAGS
        return twin

    # ---------------------------------------------------------------- groups and streams

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Divide the ranks into one communicator per color, ordered by `key` (default: the rank).
        Collective.
        """
        color, key = whole("color", color), self.rank if key is None else whole("key", key)
        agree(self, "split")
        with self.meeting("split"):
            wire = self.wire.split(color, key, f"{self.name}/{next(self._children)}.{color}")
        return Communicator(wire, self.ledger.of_group())

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """Return a communicator of `ranks`, in this order. Collective among these ranks alone:
        the others need not know of it.

        Parameters
        ----------
        name : str
            The same on all `ranks`, and another one for each group that they make.

        Raises
        ------
        ValueError
            If this rank is not one of them, or they are not different ranks that there are.
        NotImplementedError
            On the `torch` wire, whose groups are made by all ranks together.
        """
        ranks = ranks_of(name, ranks, self.size)
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not one of the ranks {ranks} of {name!r}")
        with self.meeting(f"the group {name}"):
            wire = self.wire.among(ranks, f"{self.name}/{name}")
        return Communicator(wire, self.ledger.of_group())

    def fork(self) -> Communicator:
        """Return a communicator of the same ranks for another thread to use beside this one.
        Collective.
        """
        agree(self, "fork")
        with self.meeting("fork"):
            wire = self.wire.fork(f"{self.name}+{next(self._children)}")
        twin = Communicator(wire, self.ledger.of_fork(wire.name.removeprefix("world")))
        twin.registered = self.registered
        return twin

    def levels(self, size: int | None = None) -> Levels:
        """Return this rank's communicators inside its node and across the nodes. Collective.

        A node is `size` neighbouring ranks, or by default the ranks that share memory.
        """
        if size is None:
            node, place = self.node[0], self.node.index(self.rank)
        else:
            node, place = divmod(self.rank, whole("size", size, least=1))
        return Levels(self.split(node), self.split(place))

    def node_levels(self) -> Levels:
        """Return `levels()`, which the first call makes."""
        return self.keep(Levels, self.levels)

    def stream(self) -> Stream[Communicator]:  # type: ignore[override]  # used as the book's is
        """Return a queue that runs collectives beside this thread, in the order of launching.
        Collective.
        """
        return self.wire.stream(self)

    def all_gather_object(self, answer: Any) -> list[Any]:
        """Return every rank's `answer`, by rank: small plain data to set things up with, such as
        shapes. Collective.

        It goes beside the program's messages: it is not counted in `traffic` and costs no virtual
        time.
        """
        with self.meeting("all_gather_object"):
            return self.wire.all_gather_object(answer)

    def meeting(self, what: str) -> AbstractContextManager[None]:
        """Have reports say during the body that this thread waits for all ranks, unless it waits
        already.
        """
        return self.ledger.status.awaiting(Awaited(what, self.members), self.clock())

    def hand_over(self) -> None:
        """Let other simulated ranks go on, if they take turns; elsewhere do nothing."""
        self.wire.hand_over()

    def keep(self, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return what an algorithm keeps between its calls: the one object of its class, made by
        the first call.
        """
        kept: Kept | None = self.kept.get(kind)
        if kept is None:
            kept = self.kept[kind] = make()
        return kept

    # ---------------------------------------------------------------- registered memory

    def allocate(self, shape: int | tuple[int, ...], dtype: object) -> Buffer:
        """Return a zeroed *registered* buffer, which the other ranks of the node can read in place.
        Collective.

        A tensor for a torch dtype, else a numpy array. All ranks allocate the same bytes, and give
        a collective the same part of a registered buffer on every rank, or of none on any.
        """
        known = dtype_of(dtype)
        bytes = int(np.prod(shape, dtype=np.int64)) * known.itemsize
        same_call(self, "allocate", f"{bytes} bytes")
        with self.meeting("allocate"):
            memory, everyones = self.wire.allocate(max(bytes, 1), not isinstance(known, np.dtype))
        return shaped(self.registered.add(memory, everyones) if everyones else memory, shape, known)

    @cached_property
    def nodes(self) -> list[tuple[int, ...]]:
        """For each rank, the ranks of this communicator that share memory with it, itself
        included.
        """
        return self.wire.nodes()

    @property
    def node(self) -> tuple[int, ...]:
        """This rank's own of `nodes`."""
        return self.nodes[self.rank]

    def peers(self, array: Buffer, lengths: Sequence[int] | None = None) -> list[Any] | None:
        """Return every rank's counterpart of a flat numpy view of registered memory; see
        `Registered.peers`.
        """
        return self.registered.peers(array, lengths)

    def fence(self, bytes: int = 0) -> None:
        """Barrier after which each rank of the node sees what the others wrote to registered memory
        before it. MismatchError unless all say the same `bytes`, which no message tells.
        """
        self.ledger.status.brings = bytes
        if not self.wire.fence(self.ledger.status):
            self.barrier()

    def reach(self, bytes: int, peer: int) -> None:
        """Count `bytes` read from or written to a peer's memory: they crossed a link, though in no
        message.
        """
        self.ledger.traffic.sent(0, bytes)
        self.wire.reach(bytes, peer)

    # ---------------------------------------------------------------- time

    def advance(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass, as if computing. On real wires this only checks its
        argument.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"advance({seconds}): time does not run backwards, nor for ever")
        self.wire.advance(seconds)

    @property
    def seen(self) -> bool:
        """Whether somebody sees spans: a trace, a profiler or a recorder."""
        return self.ledger.trace is not None or self.ledger.mark is not None

    def span(
        self, name: str, kind: EventKind = COMPUTE, bytes: int = 0, engine_bytes: int | None = None
    ) -> Span:
        """Return a context that records an event around its body and counts the time if it is
        communication.
        """
        return Span(self, name, kind, bytes, engine_bytes)

    copy = staticmethod(copy)

    def computing(self, function: Computing) -> Computing:
        """Return what computes on arrays in a collective; where it is prepared, it notes the call."""
        return function

    def carry_out(
        self,
        what: str,
        algorithm: str,
        bytes: int,
        engine_bytes: int | None,
        work: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        """Call `work(*arguments)`, the collective `what`, in a span of `bytes`."""
        if engine_bytes is not None or self.seen:
            with self.span(f"{what} {algorithm}", COLLECTIVE, bytes, engine_bytes):
                return work(*arguments)
        # Nobody sees a span, and small collectives notice what it costs: only time is counted.
        started = self.clock()
        try:
            work(*arguments)
        finally:
            self.ledger.traffic.waited(self.clock() - started)

    # ---------------------------------------------------------------- helpers

    def _checked_exchange(
        self, out: book.Buffer, to: int, into: book.Buffer, source: int, tag: int
    ) -> tuple[Array, Array]:
        leaving = self._checked(out, to, tag, "to")
        arriving = self._checked(into, source, tag, "source")
        if out is into and type(out) is not Nowhere:
            raise ValueError(
                "exchange needs two buffers: what leaves must not be overwritten by what arrives"
            )
        return leaving, arriving

    def _checked(self, buffer: Any, peer: int, tag: int, role: str) -> Array:
        if type(peer) is not int or type(tag) is not int:
            peer, tag = whole(role, peer), whole("tag", tag)
        if not 0 <= peer < self.size:
            raise ValueError(
                f"{role}={peer} is not a rank: there are {self.size}, numbered 0 to {self.size - 1}"
            )
        if peer == self.rank:
            raise ValueError(f"{role}={peer} is this rank itself: copy the buffer instead")
        if not 0 <= tag < TAGS:
            raise ValueError(f"tag={tag} is out of range: use 0 to {TAGS - 1}")
        return flatten(buffer, writable=role == "source")


class Levels(NamedTuple):
    """The ranks of this one's node, and the ranks at its place on all nodes."""

    inside: Communicator
    across: Communicator
