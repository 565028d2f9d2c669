"""A rank and its messages. Everything in this book is built from `isend` and `irecv`.

    rank 0 ── send(buffer, to=1, tag=7) ───────▶ rank 1: recv(buffer, source=0, tag=7)

A buffer is a contiguous numpy array or torch tensor. The receiver names its sender and the tag, and
brings a buffer of exactly the message's bytes. Messages of one tag between two ranks arrive in the
order they were sent. Nobody receives from any source, so no result depends on who was faster.
"Collective" in this book means that all ranks of the group must call it.

    Communicator        checks and counts; the same for all kinds of ranks
      └─ Transport      carries bytes: between threads (threads.py), or processes (processes.py)
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

TAGS = 1 << 16  # Tags of users are below; `barrier` and `split` use the tag TAGS itself.


class Buffer(Protocol):
    """A contiguous numpy array or torch tensor."""

    @property
    def nbytes(self) -> int: ...


class Request(Protocol):
    """A message under way. After `wait` its buffer may be read (receive) or changed (send)."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Messages between the ranks of one group, of which this rank is number `rank`."""

    rank: int
    size: int

    def isend(self, buffer: Buffer, to: int, tag: int) -> Request: ...
    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request: ...
    def group(self, members: list[int]) -> Transport: ...  # Of these ranks: each of them calls it.

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None:
        receive = self.irecv(into, source, tag)
        send = self.isend(out, to, tag)
        receive.wait()
        send.wait()

    def event(self) -> Any:
        return threading.Event()  # A thread of this rank will `wait` for what another will `set`.

    def clock(self) -> float:
        return time.perf_counter()

    def advance(self, seconds: float) -> None:
        return  # Only virtual time can be moved.


@dataclass
class Traffic:
    messages: int = 0  # that this rank has sent
    bytes: int = 0


class Communicator:
    """A group of ranks that can send to each other; to run, `minidist.full.comm.Communicator`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.traffic = Traffic()
        # Seconds of the machine, or virtual ones (cluster.py), which `advance` lets pass.
        self.clock = transport.clock
        self.advance = transport.advance

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Start sending; leave the buffer unchanged until you have waited for the request."""
        self._check("to", to)
        self._count(buffer)
        return self.transport.isend(buffer, to, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Start receiving; the buffer holds the message once you have waited for the request."""
        self._check("source", source)
        return self.transport.irecv(buffer, source, tag)

    def send(self, buffer: Buffer, to: int, tag: int = 0) -> None:
        """Send; this may wait for the receiver, so two ranks that both send first may deadlock."""
        self.isend(buffer, to, tag).wait()

    def recv(self, buffer: Buffer, source: int, tag: int = 0) -> None:
        """Wait for the message of `source`, and fill the buffer, which has exactly its bytes."""
        self.irecv(buffer, source, tag).wait()

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int = 0) -> None:
        """Send `out` and receive `into` at once, so that a ring of exchanges cannot deadlock."""
        self._check("to", to)
        self._check("source", source)
        self._count(out)
        self.transport.exchange(out, to, into, source, tag)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._rows_of_all([0])

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return the communicator of the ranks that give this color, ordered by key. Collective."""
        answers = self._rows_of_all([color, self.rank if key is None else key])
        members = [rank for rank in range(self.size) if answers[rank][0] == color]
        members.sort(key=lambda rank: answers[rank][1])
        return Communicator(self.transport.group(members))

    def fork(self) -> Communicator:
        """Return a communicator of the same ranks whose messages never meet these. Collective."""
        twin = Communicator(self.transport.group(list(range(self.size))))
        twin.traffic = self.traffic
        return twin

    def stream(self) -> Stream:
        return Stream(self)

    def _rows_of_all(self, row: list[int]) -> Any:
        """Return every rank's row, in ceil(log2 P) uncounted messages. (Bruck et al. 1997.)

        When rank r knows k rows, its own and the next ones, it receives k more from rank r + k.
        """
        rows = np.array([row])
        while (known := len(rows)) < self.size:
            to, source = (self.rank - known) % self.size, (self.rank + known) % self.size
            leaving = rows[: self.size - known]
            arriving = np.empty_like(leaving)
            self.transport.exchange(leaving, to, arriving, source, TAGS)
            rows = np.concatenate([rows, arriving])
        # Now the first row is this rank's. Therefore all move on by `rank` places.
        return np.roll(rows, self.rank, axis=0).tolist()

    def _check(self, role: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            others = f"use another rank of 0 to {self.size - 1}"
            raise ValueError(f"{role}={peer} on rank {self.rank} of {self.size}: {others}")

    def _count(self, buffer: Buffer) -> None:
        self.traffic.messages += 1
        self.traffic.bytes += buffer.nbytes


class Stream:
    """A thread of this rank that runs collectives in the order of launching. Collective.

    stream = comm.stream()
    stream.launch(all_reduce, buffer, stream.comm)     returns at once
    stream.wait()                                      all that was launched is done
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm.fork()
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.launched: list[tuple[Any, Future[float]]] = []

    def launch(self, job: Callable[..., object], *arguments: object) -> None:
        """Have `job(*arguments)` run after all that was launched before."""
        earliest = self.comm.clock()
        event = self.comm.transport.event()

        def run() -> float:
            try:
                # On a modelled cluster a job begins when it was launched, or the last one ended.
                self.comm.advance(max(0.0, earliest - self.comm.clock()))
                job(*arguments)
                return self.comm.clock()
            finally:
                event.set()

        self.launched.append((event, self.thread.submit(run)))

    def wait(self) -> None:
        """Return once every job has run; raise what one of them raised."""
        while self.launched:
            event, result = self.launched.pop(0)
            event.wait()
            ended = result.result()
            self.comm.advance(max(0.0, ended - self.comm.clock()))


def flat(buffer: Any) -> Any:
    """View a buffer as one dimension. What is not contiguous has no such view, only a copy."""
    numpy = isinstance(buffer, np.ndarray)
    contiguous = buffer.flags.c_contiguous if numpy else buffer.is_contiguous()
    if not contiguous:
        fix = "use x.copy() of an array, x.contiguous() of a tensor"
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)} is not contiguous: {fix}")
    return buffer.reshape(-1)


def bytes_of(buffer: Any) -> Any:
    """View a buffer as its bytes, uint8 [nbytes]."""
    if isinstance(buffer, np.ndarray):
        return flat(buffer).view(np.uint8)
    # Not by `numpy()`: after that, torch would refuse to free the memory of a sharded parameter.
    return flat(buffer.detach()).view(sys.modules["torch"].uint8)


def empty_like(buffer: Any, length: int | None = None) -> Any:
    """Return a new buffer of the same library, dtype and device, and the same shape or [length]."""
    shape = buffer.shape if length is None else (length,)
    numpy = isinstance(buffer, np.ndarray)
    return np.empty(shape, buffer.dtype) if numpy else buffer.new_empty(shape)


def copy(buffer: Any) -> Any:
    return buffer.copy() if isinstance(buffer, np.ndarray) else buffer.clone()
