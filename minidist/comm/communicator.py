"""Ranks and messages. Everything above is built from `isend` and `irecv`.

    rank 0 ── send(buffer, to=1, tag=7) ───────▶ rank 1: recv(buffer, source=0, tag=7)

A message needs both ends: the receiver names its sender and the tag, and brings a buffer of exactly the message's
bytes. Messages of one tag between two ranks arrive in the order they were sent. There is no receive from any source,
so what a program does never depends on who was faster.

A wire (`threads`, `mpi`, `torch`) is a subclass that supplies the underscored methods; what users call is written
here once, with its checks, its counting and its tracing.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from minidist.comm.agree import agree
from minidist.comm.buffers import flatten, shaped
from minidist.comm.registered import Registered
from minidist.comm.report import TAGS
from minidist.comm.request import Awaited, Pending, Request, Span, Status, Statuses, Traffic, name_flow, record_end
from minidist.comm.stream import ThreadStream
from minidist.trace import Trace

if TYPE_CHECKING:
    from minidist.comm.buffers import Array, Buffer
    from minidist.comm.stream import Stream

Kept = TypeVar("Kept")


class Nodes(list[tuple[int, ...]]):
    """Every rank's node, by rank."""


class Communicator(ABC):
    """A group of ranks that can send to each other.

    Attributes
    ----------
    rank, size : int
        This rank's number, and how many there are.
    members : tuple[int, ...]
        The number of each rank in the world that the job was started with.
    traffic : Traffic
        Messages and bytes that this rank sent.
    native : object or None
        The engine's own collectives, to compare with.
    """

    wire: str = ""
    native: Any = None

    def __init__(self, rank: int, members: tuple[int, ...], name: str = "world", origin: Communicator | None = None):
        self.rank, self.size = rank, len(members)
        self.members = members
        self.name = name
        self.track: str = origin.track if origin else "main"
        self.traffic: Traffic = Traffic(origin.traffic if origin else None)
        self.trace: Trace | None = origin.trace if origin else None
        self.debug: bool = origin.debug if origin else False
        self.status: Status = origin.status if origin else Status()
        self.statuses: Statuses = origin.statuses if origin else WeakValueDictionary({id(self.status): self.status})
        self.kept: dict[type, Any] = {}
        self.tag_offset = 0
        self._children = itertools.count(1)
        self.registered = Registered()
        self.flows: Counter[tuple[int, int, int]] = Counter()
        self._changed = threading.Condition()

    # ---------------------------------------------------------------- what a wire supplies

    @abstractmethod
    def _isend(self, array: Array, to: int, tag: int) -> Request: ...

    @abstractmethod
    def _irecv(self, array: Array, source: int, tag: int) -> Request: ...

    def _exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        receive = self._irecv(arriving, source, tag)
        send = self._isend(leaving, to, tag)
        receive.wait()
        send.wait()

    @abstractmethod
    def _split(self, color: int, key: int, name: str) -> Communicator: ...

    @abstractmethod
    def _fork(self, name: str) -> Communicator: ...

    @abstractmethod
    def _allocate(self, bytes: int) -> tuple[Any, list[Any]]:
        """Return (this rank's memory, every rank's as seen from here or [] if not all can be seen), as bytes."""

    @abstractmethod
    def roll_call(self, answer: Any) -> list[Any]:
        """Return every rank's `answer`, by rank: small plain data to set things up with, such as shapes. Collective.

        It goes beside the program's messages: it is not counted in `traffic` and costs no virtual time.
        """

    @property
    @abstractmethod
    def node(self) -> tuple[int, ...]:
        """The ranks of this communicator that share memory with this one, itself included."""

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        """Every rank's `node`, by rank. Collective when first asked for."""
        return self.keep(Nodes, lambda: Nodes(self.roll_call(self.node)))

    def keep(self, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return what an algorithm keeps between its calls: the one object of its class, made by the first call."""
        if kind not in self.kept:
            self.kept[kind] = make()
        return self.kept[kind]  # type: ignore[no-any-return]

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the whole job because of `error`, which happened on a thread that nobody waits for."""

    # ---------------------------------------------------------------- messages

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Pending:
        """Start sending; the buffer must stay unchanged until the returned request has been waited for."""
        array = self._checked(buffer, to, tag, "to")
        self.traffic.sent(1, array.nbytes)
        return Pending(self, "send", array, to, tag, self._isend(array, to, tag + self.tag_offset))

    def irecv(self, buffer: Buffer, source: int, tag: int = 0) -> Pending:
        """Start receiving; the buffer holds the message once the returned request has been waited for."""
        array = self._checked(buffer, source, tag, "source")
        return Pending(self, "recv", array, source, tag, self._irecv(array, source, tag + self.tag_offset))

    def send(self, buffer: Buffer, to: int, tag: int = 0) -> None:
        """Send and wait until the buffer may be changed. It may wait for the receiver: never rely on that it does not.

        Raises
        ------
        ValueError
            If `to` is not another rank, the tag is negative or too large, or the buffer is not contiguous.
        TypeError
            If it is not a buffer, or of a dtype that does not travel.
        """
        self.isend(buffer, to, tag).wait()

    def recv(self, buffer: Buffer, source: int, tag: int = 0) -> None:
        """Wait for the message of `source` and fill the buffer, which must have exactly its size. Raises as `send`."""
        self.irecv(buffer, source, tag).wait()

    def exchange(self, outgoing: Buffer, to: int, incoming: Buffer, source: int, tag: int = 0) -> None:
        """Send `outgoing` to one rank and receive `incoming` from one, both posted before either is waited for.

        A ring in which every rank exchanges cannot deadlock; one in which every rank sends and then receives can.
        """
        leaving = self._checked(outgoing, to, tag, "to")
        arriving = self._checked(incoming, source, tag, "source")
        if outgoing is incoming:
            raise ValueError("exchange needs two buffers: what leaves must not be overwritten by what arrives")
        self.traffic.sent(1, leaving.nbytes)
        started = self.status.since = self.clock()
        self.status.waiting = Awaited(
            "exchange, receiving from", (self.members[source],), tag + self.tag_offset, arriving.nbytes
        )
        try:
            self._exchange(leaving, to, arriving, source, tag + self.tag_offset)
        finally:
            self.status.waiting = None
        if self.trace is not None:
            record_end(self, "send", to, name_flow(self, "send", to, tag), leaving.nbytes, started)
            record_end(self, "recv", source, name_flow(self, "recv", source, tag), arriving.nbytes, started)
        if not self.tag_offset:
            self.traffic.waited(self.clock() - started)

    def barrier(self) -> None:
        """Return once every rank has called it.

        Dissemination (Hensgen, Finkel & Manber 1988): after round k a rank has heard, directly or not, from the
        2^k ranks before it. ceil(log2 P) empty messages a rank.
        """
        nothing, nowhere = np.empty(0, np.uint8), np.empty(0, np.uint8)
        distance = 1
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.internal.exchange(nothing, to, nowhere, source)
            distance *= 2

    @cached_property
    def internal(self) -> Communicator:
        """The same ranks, on tags that users cannot name: a collective never takes a user's message for its own."""
        if self.tag_offset:
            return self
        twin = copy.copy(self)
        twin.tag_offset = TAGS
        return twin

    # ---------------------------------------------------------------- groups and streams

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Divide the ranks into one communicator per color, ordered by `key` (default: the rank). Collective."""
        color, key = int(color), self.rank if key is None else int(key)
        agree(self, "split")
        with self.status.meeting("split", self):
            return self._split(color, key, f"{self.name}/{next(self._children)}.{color}")

    def fork(self) -> Communicator:
        """Return a communicator of the same ranks for another thread to use beside this one. Collective."""
        agree(self, "fork")
        with self.status.meeting("fork", self):
            twin = self._fork(f"{self.name}+{next(self._children)}")
        twin.track = twin.name.removeprefix("world")
        twin.registered = self.registered
        twin.traffic, twin.status = Traffic(self.traffic, other_thread=True), Status()
        self.statuses[id(twin.status)] = twin.status
        return twin

    def stream(self) -> Stream[Communicator]:
        """Return a queue that runs collectives beside this thread, in the order of launching. Collective."""
        return ThreadStream(self)

    def wait_until(self, ready: Callable[[], bool], what: str, idle: bool = False) -> None:
        """Block until `ready()`, which another thread of this rank makes true before it calls `wake`.

        Who waits `idle`, a stream without work, keeps nobody waiting.
        """
        with self._changed:
            while not ready():
                self._changed.wait(1.0)

    def wake(self, blocking: bool = True) -> None:
        """Have every `wait_until` of this rank look again, at once unless another thread may not be waited for."""
        if self._changed.acquire(blocking):
            self._changed.notify_all()
            self._changed.release()

    # ---------------------------------------------------------------- registered memory

    def allocate(self, shape: int | tuple[int, ...], dtype: object) -> Buffer:
        """Return a zeroed *registered* buffer, which the other ranks of the node can read in place. Collective.

        A tensor for a torch dtype, else a numpy array. All ranks allocate the same bytes, and give a collective
        registered buffers on every rank or on none.
        """
        plain = shaped(np.empty(0, np.uint8), 0, dtype).dtype.itemsize
        bytes = int(np.prod(shape, dtype=np.int64)) * plain
        agree(self, "allocate", f"{bytes} bytes")
        with self.status.meeting("allocate", self):
            memory, everyones = self._allocate(max(bytes, 1))
        return shaped(self.registered.add(memory, everyones) if everyones else memory, shape, dtype)

    def peers(self, array: Array, lengths: Sequence[int] | None = None) -> list[Any] | None:
        """Return every rank's counterpart of a flat numpy view of registered memory; see `Registered.peers`."""
        return self.registered.peers(array, lengths)

    def fence(self) -> None:
        """Barrier after which each rank of the node sees what the others wrote to registered memory before it."""
        self.barrier()

    def reach(self, bytes: int, peer: int) -> None:
        """Account for reading or writing `bytes` of a peer's memory: they crossed a link, though in no message."""
        self.traffic.sent(0, bytes)

    # ---------------------------------------------------------------- time

    def clock(self) -> float:
        """Return seconds: the machine's clock, or on a modelled cluster the virtual time of this rank."""
        return time.perf_counter()

    def advance(self, seconds: float) -> None:
        """Compute for `seconds` of virtual time. Real wires only check: there, computing takes its own time."""
        if seconds < 0:
            raise ValueError(f"advance({seconds}): time does not run backwards")

    def span(self, name: str, kind: str = "compute", bytes: int = 0, native: bool = False) -> Span:
        """Return a context that records an event around its body and counts the time if it is communication."""
        return Span(self, name, kind, bytes, native)

    # ---------------------------------------------------------------- helpers

    def _checked(self, buffer: Buffer, peer: int, tag: int, role: str) -> Array:
        if not 0 <= peer < self.size:
            raise ValueError(f"{role}={peer} is not a rank: there are {self.size}, numbered 0 to {self.size - 1}")
        if peer == self.rank:
            raise ValueError(f"{role}={peer} is this rank itself: copy the buffer instead")
        if not 0 <= tag < TAGS:
            raise ValueError(f"tag={tag} is out of range: use 0 to {TAGS - 1}")
        return flatten(buffer, writable=role == "source")
