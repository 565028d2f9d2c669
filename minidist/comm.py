"""A rank and its messages. Everything in this book is built from `isend` and `irecv`.

    rank 0 ── send(buffer, to=1, tag=7) ───────▶ rank 1: recv(buffer, source=0, tag=7)

A message needs both ends. The receiver names its sender and the tag, and brings a buffer of exactly
the message's bytes. Messages of one tag between two ranks arrive in the order they were sent.
There is no receive from any source, so what a program does never depends on who was faster.

    Communicator        checks and counts; the same for all kinds of ranks
      └─ Transport      carries bytes: between threads (threads.py), or processes (processes.py)

A buffer is a contiguous numpy array or torch tensor. Nothing here imports torch until a tensor
comes, so a program on numpy arrays starts in a fifth of a second.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Array: TypeAlias = np.ndarray[Any, Any]
Buffer: TypeAlias = "Array | torch.Tensor"
SomeBuffer = TypeVar("SomeBuffer", bound=Buffer)

TAGS = 1 << 16  # tags of users are below; `barrier` and `split` use the tag TAGS itself


class Request(Protocol):
    """A message under way. Keep it until it has been waited for."""

    def wait(self) -> object:
        """Block until the buffer may be read (receive) or changed (send) again."""


class Transport(Protocol):
    """Messages between the ranks of one group, of which this rank is number `rank`."""

    rank: int
    size: int

    def isend(self, buffer: Buffer, to: int, tag: int) -> Request: ...
    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request: ...
    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None: ...
    def group(self, members: list[int]) -> Transport: ...  # these ranks alone, which all call it
    def clock(self) -> float: ...
    def advance(self, seconds: float) -> None: ...


@dataclass
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0


class Communicator:
    """A group of ranks that can send to each other; this one is number `rank` of `size`."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.traffic = Traffic()

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Start sending; leave the buffer unchanged until the request has been waited for."""
        self._check("to", to)
        self._count(buffer)
        return self.transport.isend(buffer, to, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Start receiving; the buffer holds the message once the request has been waited for."""
        self._check("source", source)
        return self.transport.irecv(buffer, source, tag)

    def send(self, buffer: Buffer, to: int, tag: int = 0) -> None:
        """Send, and return when the buffer may be changed.

        It may wait for the receiver or not, depending on the transport and the size. A program that
        needs one of the two is wrong: two ranks that both send first may wait for ever.
        """
        self.isend(buffer, to, tag).wait()

    def recv(self, buffer: Buffer, source: int, tag: int = 0) -> None:
        """Wait for the message of `source`, and fill the buffer, which has exactly its bytes."""
        self.irecv(buffer, source, tag).wait()

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int = 0) -> None:
        """Send `out` to one rank and receive `into` from one.

        Both are started before either is waited for. Therefore a ring in which every rank exchanges
        cannot deadlock; one in which every rank sends and then receives can.
        """
        self._check("to", to)
        self._check("source", source)
        self._count(out)
        self.transport.exchange(out, to, into, source, tag)

    def barrier(self) -> None:
        """Return once every rank has called it.

        In round k a rank hears from the rank 2^k before it, and so from the 2^k ranks that this one
        has heard from: ceil(log2 P) messages of one byte. (Hensgen, Finkel & Manber 1988.)
        """
        distance, word = 1, np.zeros((2, 1), np.uint8)
        while distance < self.size:
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self.transport.exchange(word[0], to, word[1], source, TAGS)
            distance *= 2

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Divide the ranks into one communicator for each color. Collective.

        In a group, ranks are ordered by `key`, by default their rank here. Cost: P - 1 messages of
        16 bytes.
        """
        answers = np.zeros((self.size, 2), np.int64)
        answers[self.rank] = color, self.rank if key is None else key
        # An all-gather around a ring: in each step, hand on the row that came last.
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for step in range(self.size - 1):
            leaving, arriving = (self.rank - step) % self.size, (left - step) % self.size
            self.transport.exchange(answers[leaving], right, answers[arriving], left, TAGS)
        members = [rank for rank in range(self.size) if answers[rank, 0] == color]
        members.sort(key=lambda rank: (answers[rank, 1], rank))
        return Communicator(self.transport.group(members))

    def fork(self) -> Communicator:
        """Return a communicator of the same ranks for another thread of this rank. Collective.

        Its messages never meet those of this one, so the two threads need no common order. They are
        counted together.
        """
        twin = Communicator(self.transport.group(list(range(self.size))))
        twin.traffic = self.traffic
        return twin

    def clock(self) -> float:
        """Return seconds: the machine's, or on a modelled cluster the virtual time of this rank."""
        return self.transport.clock()

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, as if this rank computed. Real ranks compute by themselves."""
        self.transport.advance(seconds)

    def _check(self, role: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            others = f"use another rank of 0 to {self.size - 1}"
            raise ValueError(f"{role}={peer} on rank {self.rank} of {self.size}: {others}")

    def _count(self, buffer: Buffer) -> None:
        self.traffic.messages += 1
        self.traffic.bytes += buffer.nbytes


class Stream:
    """A thread of this rank that runs collectives in the order of launching. Collective.

    stream = Stream(comm)
    stream.launch(all_reduce, buffer, stream.comm)     returns at once
    stream.wait()                                      all that was launched is done
    """

    def __init__(self, comm: Communicator) -> None:
        self.caller, self.comm = comm, comm.fork()
        self.jobs: queue.SimpleQueue[tuple[float, Callable[..., object], tuple[Any, ...]]]
        self.jobs, self.done = queue.SimpleQueue(), queue.SimpleQueue[BaseException | None]()
        self.open = 0
        # A daemon: a job that waits for ever must not keep a failed program alive.
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, job: Callable[..., object], *arguments: object) -> None:
        """Have `job(*arguments)` run after all that was launched before."""
        self.open += 1
        self.jobs.put((self.caller.clock(), job, arguments))

    def wait(self) -> None:
        """Return once every job has run; raise what one of them raised."""
        while self.open:
            self.open -= 1
            if (error := self.done.get()) is not None:
                raise error
        self.caller.advance(max(0.0, self.comm.clock() - self.caller.clock()))

    def _run(self) -> None:
        while True:
            launched, job, arguments = self.jobs.get()
            try:
                # On a modelled cluster a job begins when it was launched, or when the last ended.
                self.comm.advance(max(0.0, launched - self.comm.clock()))
                job(*arguments)
                self.done.put(None)
            except BaseException as error:
                self.done.put(error)


# ---------------------------------------------------------------- buffers


def bytes_of(buffer: Any) -> Any:
    """View a contiguous array or tensor as its bytes, uint8 [nbytes], without a copy."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"an array {buffer.shape} is not contiguous: use x.copy()")
        return buffer.reshape(-1).view(np.uint8)
    # Not by `numpy()`: after that, torch would refuse to free the memory of a sharded parameter.
    if not buffer.is_contiguous():
        raise ValueError(f"a tensor {list(buffer.shape)} is not contiguous: use x.contiguous()")
    elements = buffer.detach().as_strided((buffer.numel(),), (1,))
    return elements.view(sys.modules["torch"].uint8)


def tensor_of(buffer: Any) -> Any:
    """View a buffer of either library as a tensor of its bytes."""
    import torch

    return torch.as_tensor(bytes_of(buffer))


def empty_like(buffer: SomeBuffer) -> SomeBuffer:
    """Return a new buffer of the same shape, dtype and device."""
    if isinstance(buffer, np.ndarray):
        return np.empty_like(buffer)
    return buffer.new_empty(buffer.shape)  # type: ignore[return-value]
