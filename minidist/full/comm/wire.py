"""A wire: what a kind of ranks has to offer. `Communicator`, which users hold, stands on one.

    Communicator     checks, counts and traces          the same on all wires
      └─ Wire        carries flat arrays                threads, mpi, torch; or something around one of these

A wire checks nothing that `Communicator` has checked, and counts nothing. Whoever wants to see
everything that passes (a recording, the grader) puts a `WireAround` between the two.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from minidist.full.comm.buffers import Array
from minidist.full.comm.job.background import BackgroundThread
from minidist.full.comm.ledger import Status
from minidist.full.comm.stream import Comm, Stream, ThreadStream


class Request(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Block until the buffer may be read (receive) or written (send) again."""

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""

    def drop(self) -> bool:
        """Tell whether it may be dropped: whether it is through, or its job is over."""
        return self.test()


class Wire(ABC):
    """Messages between the ranks of one group.

    Attributes
    ----------
    kind : str
        `threads`, `mpi` or `torch`.
    rank, size : int
        This rank's number in the group, and how many there are.
    members : tuple[int, ...]
        The number of each rank of the group in the world that the job was started with.
    name : str
        The group's.
    homes : sequence
        For each rank of the world, what names its machine: ranks of one home share memory.
    one_process : bool
        Whether the ranks share one: its clock, its objects, its random numbers.
    carries_cuda : bool
        Whether CUDA tensors travel, from this rank's own GPU.
    debug : bool
        Whether the two ends of each message tell each other its size and dtype beside it, where the
        wire needs that.
    """

    kind: str = ""
    one_process: bool = False
    carries_cuda: bool = False
    debug: bool = False

    def __init__(
        self, rank: int, members: tuple[int, ...], name: str, homes: Sequence[object]
    ) -> None:
        self.rank, self.size, self.members, self.name, self.homes = (
            rank,
            len(members),
            members,
            name,
            homes,
        )
        self._changed = threading.Condition()

    # ---------------------------------------------------------------- messages

    @abstractmethod
    def isend(self, array: Array, to: int, tag: int) -> Request:
        """Start sending."""

    @abstractmethod
    def irecv(self, array: Array, source: int, tag: int) -> Request:
        """Start receiving a message of exactly the array's bytes."""

    def exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        """Send one array and receive another, both posted before either is waited for."""
        receive = self.irecv(arriving, source, tag)
        send = self.isend(leaving, to, tag)
        receive.wait()
        send.wait()

    def prepare_exchange(
        self, leaving: Array, to: int, arriving: Array, source: int, tag: int
    ) -> Callable[..., None]:
        """Return what is called as `exchange`, with these arguments again and again."""
        return self.exchange

    @abstractmethod
    def all_gather_object(self, answer: Any) -> list[Any]:
        """Return every rank's `answer`, by rank: small plain data, beside the program's messages.
        Collective.
        """

    def conclude(self, answer: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return what `decide` makes of every rank's `answer`, by rank. Collective.

        Ranks of one process may share the result: nobody changes it.
        """
        return decide(self.all_gather_object(answer))

    @property
    def native(self) -> Any:
        """The engine's own collectives, or None."""
        return None

    def prepare_native(
        self, what: str, collective: Callable[..., None], arguments: tuple[Any, ...]
    ) -> Callable[[], None]:
        """Return what calls `native`'s collective `what` with these arguments again and again."""
        return partial(collective, *arguments)

    # ---------------------------------------------------------------- groups and streams

    def split(self, color: int, key: int, name: str) -> Wire:
        """Return a wire between the ranks of one color, ordered by key. Collective."""
        parts: dict[int, list[int]] = self.conclude((color, key, self.rank), _parts)
        return self.derive(list(parts.values()), parts[color], name)

    def among(self, mine: list[int], name: str) -> Wire:
        """Return a wire between the ranks `mine`, in this order. Collective among these ranks
        alone, which all say the same name.
        """
        raise NotImplementedError(
            f"the {self.kind} wire makes a group only where all of its ranks call together: use "
            "split()"
        )

    def fork(self, name: str) -> Wire:
        """Return a wire between the same ranks, for another thread. Collective."""
        everyone = list(range(self.size))
        return self.derive([everyone], everyone, name, for_thread=True)

    @abstractmethod
    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> Wire:
        """Return a wire between the ranks `mine`, one of the `parts` into which all ranks are
        divided. Collective.
        """

    def stream(self, caller: Comm) -> Stream[Comm]:
        """Return a stream beside the thread that uses `caller`, the communicator on this wire.
        Collective.
        """
        return ThreadStream(caller)

    def wait_until(
        self, ready: Callable[[], bool], what: str, idle: bool = False, others: bool = False
    ) -> None:
        """Block until `ready()`, which another thread of this rank makes true before it calls
        `wake`.

        `idle=True`: a stream with no work. The deadlock check ignores it. `others=True`: it is
        another rank that makes it true, so the limit holds.
        """
        with self._changed:
            while not ready():
                self._changed.wait(1.0)

    def wake(self, blocking: bool = True) -> None:
        """Make every `wait_until` look again. With `blocking=False`, never wait for a lock."""
        if self._changed.acquire(blocking):
            self._changed.notify_all()
            self._changed.release()

    def start(self, work: Callable[[], None], name: str) -> None:
        """Begin `work()` beside the caller: what a stream does."""
        BackgroundThread(work, name=name).start()

    def hand_over(self) -> None:  # noqa: B027  # ranks that run at the same time need not
        """Let other ranks go on, where exactly one runs at a time."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the whole job because of `error`, which happened on a thread that nobody waits
        for.
        """

    # ---------------------------------------------------------------- shared memory

    def nodes(self) -> list[tuple[int, ...]]:
        """Return for each rank which ranks share memory with it, itself included."""
        residents = defaultdict(list)
        for rank, member in enumerate(self.members):
            residents[self.homes[member]].append(rank)
        nodes = {home: tuple(ranks) for home, ranks in residents.items()}
        return [nodes[self.homes[member]] for member in self.members]

    @abstractmethod
    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        """Return (this rank's zeroed memory, every rank's as seen from here or [] if not all can be
        seen), as bytes.
        """

    def fence(self, status: Status) -> bool:
        """Have all ranks see what was stored before; return False where it takes a barrier of
        messages. Raise MismatchError if what they bring differs.
        """
        return False

    def reach(self, bytes: int, peer: int) -> None:  # noqa: B027  # on real wires it takes its own time
        """Let the virtual time pass that reading or writing so much of a peer's memory takes."""

    # ---------------------------------------------------------------- time

    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Return seconds: the machine's clock, or on a modelled cluster the virtual time of this
    rank.
    """

    def advance(self, seconds: float) -> None:  # noqa: B027  # on real wires computing takes its own time
        """Let virtual time pass."""


class WireAround(Wire):
    """A wire around a wire, which hands everything on. A subclass overrides what it watches."""

    def __init__(self, inner: Wire) -> None:
        super().__init__(inner.rank, inner.members, inner.name, inner.homes)
        self.inner = inner
        self.kind = inner.kind
        self.one_process = inner.one_process
        self.carries_cuda = inner.carries_cuda
        self.clock, self.advance, self.reach = inner.clock, inner.advance, inner.reach  # type: ignore[method-assign]
        self.wait_until, self.wake = inner.wait_until, inner.wake  # type: ignore[method-assign]
        self.start, self.hand_over = inner.start, inner.hand_over  # type: ignore[method-assign]

    def isend(self, array: Array, to: int, tag: int) -> Request:
        return self.inner.isend(array, to, tag)

    def irecv(self, array: Array, source: int, tag: int) -> Request:
        return self.inner.irecv(array, source, tag)

    def all_gather_object(self, answer: Any) -> list[Any]:
        return self.inner.all_gather_object(answer)

    @property
    def native(self) -> Any:
        return self.inner.native

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> Wire:
        return self.inner.derive(parts, mine, name, for_thread)

    def among(self, mine: list[int], name: str) -> Wire:
        return self.inner.among(mine, name)

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        return self.inner.allocate(bytes, for_torch)

    def fence(self, status: Status) -> bool:
        return self.inner.fence(status)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)


def _parts(answers: list[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Return which ranks chose each color, in the order of their keys."""
    parts: dict[int, list[int]] = {}
    for chosen, _, rank in sorted(answers):
        parts.setdefault(chosen, []).append(rank)
    return parts
