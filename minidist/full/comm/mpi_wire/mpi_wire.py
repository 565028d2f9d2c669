"""The `mpi` wire: ranks are processes that `mpirun` started.

`Communicator` has checked and counted a message before `MpiWire` hands it to MPI (`isend`, `irecv`,
`exchange`). Only point-to-point messages are used, as plain bytes: what MPI can do beyond that (its
own collectives, to compare with) is behind `native`. Ranks of one node also share memory, see
`window.py`.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from minidist.full.comm.buffers import Array
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.engine.host import host
from minidist.full.comm.engine.pool import Group
from minidist.full.comm.errors import SAME, LaunchError, MismatchError, different_bytes
from minidist.full.comm.job.limit import MPI_SIZES, first_set
from minidist.full.comm.job.watchdog import Watchdog
from minidist.full.comm.ledger import Awaited, Ledger, Status
from minidist.full.comm.mpi_wire.memory import bytes_of
from minidist.full.comm.mpi_wire.noted import noted
from minidist.full.comm.mpi_wire.segment import take_names_away
from minidist.full.comm.mpi_wire.window import AVAILABLE, open_window
from minidist.full.comm.report import TAGS, label, marked_traceback, tell
from minidist.full.comm.wire import Request, Wire

BRIEFLY = range(50)  # looks at a flag before this rank is noted as waiting
# Looks at a flag before the core is offered to somebody else. The system may put two ranks on one core
# of a busy machine: an all-reduce of 4 KiB then takes 33 microseconds, with ten times the looks 142.
SPINS = 100
# seconds between two looks of a stream's thread while its rank is computing on the same core
NAP = 50e-6

# A flag polled in shared memory tells that data is there only where stores become visible in order.
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")


@dataclass(eq=False)
class MpiRequest(Request):
    """A message under way; a receive checks that the message filled its buffer, as MPI would accept
    a shorter one.
    """

    request: MPI.Request
    array: Array
    receives: bool
    wire: MpiWire
    status: MPI.Status = field(default_factory=MPI.Status)

    def wait(self) -> None:
        """Block until it is through: inside MPI, which spins, or in short naps where that would
        take a core away.
        """
        while self.wire.patient:
            if self.test():
                return
            time.sleep(NAP)
        _complete(self.request.Wait, self.status, self.array, self.receives)

    def test(self) -> bool:
        """Tell whether `wait` would return at once."""
        return _complete(self.request.Test, self.status, self.array, self.receives)


class PersistentExchange:
    """Two messages that MPI has been told of once: each call starts both, and waits for both.

    (MPI 4.0, section 3.9.)
    """

    def __init__(self, receive: MpiRequest, send: MpiRequest) -> None:
        self.receive, self.send = receive, send
        for end in (receive, send):
            weakref.finalize(self, end.request.Free).atexit = False

    def __call__(self, *_: object) -> None:
        """Exchange what was prepared; the arguments are known."""
        self.receive.request.Start()  # type: ignore[attr-defined]
        self.send.request.Start()  # type: ignore[attr-defined]
        self.receive.wait()
        self.send.wait()


class MpiWire(Wire):
    """Messages between MPI processes, over an mpi4py communicator."""

    kind = "mpi"

    def __init__(
        self,
        group: Group,
        members: tuple[int, ...],
        homes: Sequence[object],
        name: str,
        beside: MpiWire | None = None,
    ) -> None:
        super().__init__(group.handle.Get_rank(), members, name, homes)
        self.group, self.mpi = group, group.handle
        # the wire of the thread that computes while this one waits
        self.beside, self.idle = beside, False
        self._status = MPI.Status()
        # a rank's own, in shared memory: how often it has come to a fence, and what it has brought
        # to the last two: it may have come to the next fence while others still look at this one
        self._flags: list[memoryview] = []
        self._others: list[tuple[int, memoryview]] = []
        self._fences = 0

    @property
    def patient(self) -> bool:
        """Whether to wait in naps: on a stream's thread, until the thread that computes on its core
        waits for it.
        """
        return self.beside is not None and not self.beside.idle

    def wait_until(
        self, ready: Callable[[], bool], what: str, idle: bool = False, others: bool = False
    ) -> None:
        self.idle = True
        super().wait_until(ready, what, idle, others)
        self.idle = False

    def isend(self, array: Array, to: int, tag: int) -> Request:
        request = self.mpi.Isend([bytes_of(array), MPI.BYTE], to, tag)
        message = MpiRequest(request, array, False, self)
        return noted(message, self.isend, self, array, to, tag) if self._notes(tag) else message

    def irecv(self, array: Array, source: int, tag: int) -> Request:
        request = self.mpi.Irecv([bytes_of(array), MPI.BYTE], source, tag)
        message = MpiRequest(request, array, True, self)
        return noted(message, self.irecv, self, array, source, tag) if self._notes(tag) else message

    def _notes(self, tag: int) -> bool:
        """Tell whether a message has its dtype beside it: users' messages in debug mode."""
        return self.debug and tag < TAGS

    def exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        if self.patient or self._notes(tag):
            super().exchange(leaving, to, arriving, source, tag)
            return
        out, into = [bytes_of(leaving), MPI.BYTE], [bytes_of(arriving), MPI.BYTE]
        _complete(self.mpi.Sendrecv, self._status, arriving, True, out, to, tag, into, source, tag)

    def prepare_exchange(
        self, leaving: Array, to: int, arriving: Array, source: int, tag: int
    ) -> PersistentExchange:
        receive = self.mpi.Recv_init([bytes_of(arriving), MPI.BYTE], source, tag)
        send = self.mpi.Send_init([bytes_of(leaving), MPI.BYTE], to, tag)
        return PersistentExchange(
            MpiRequest(receive, arriving, True, self), MpiRequest(send, leaving, False, self)
        )

    def all_gather_object(self, answer: Any) -> list[Any]:
        return list(self.mpi.allgather(answer))

    @property
    def native(self) -> Any:
        from minidist.full.comm.mpi_wire.native_mpi import NativeMpi

        return NativeMpi(self.mpi)

    def prepare_native(
        self, what: str, collective: Callable[..., None], arguments: tuple[Any, ...]
    ) -> Callable[[], None]:
        from minidist.full.comm.mpi_wire.native_mpi import persistent

        plain = super().prepare_native(what, collective, arguments)
        return persistent(self.mpi, what, arguments) or plain

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> MpiWire:
        group = self.group.derive(
            self, parts, mine, lambda: self.mpi.Split(parts.index(mine), mine.index(self.rank))
        )
        members = tuple(self.members[rank] for rank in mine)
        return MpiWire(group, members, self.homes, name, self if for_thread else None)

    def among(self, mine: list[int], name: str) -> MpiWire:
        # The first group of these ranks stays: on it they agree which of the others they take again.
        first = self.group.pool.among.get(tuple(mine))
        if first is None:
            chosen = self.mpi.Get_group().Incl(mine)
            # the tag keeps apart what two threads make at once
            handle = self.mpi.Create_group(chosen, zlib.crc32(name.encode()) % TAGS)
            first = self.group.pool.among[tuple(mine)] = Group(handle)
        members = tuple(self.members[rank] for rank in mine)
        everyone = list(range(len(mine)))
        return MpiWire(first, members, self.homes, name).derive([everyone], everyone, name)

    def fail(self, error: BaseException) -> None:
        end_job(type(error), error, error.__traceback__)

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        if len(self.nodes()[0]) < self.size:
            return np.zeros(bytes, np.uint8), []
        memories = open_window(self, bytes)
        return memories[self.rank], memories

    def fence(self, status: Status) -> bool:
        if not self._flags:
            if not ORDERED_STORES or len(self.nodes()[0]) < self.size:
                return False  # whoever receives a message also sees what its sender stored before
            with status.awaiting(Awaited("the first fence", self.members), self.clock()):
                self._flags = [memoryview(memory).cast("q") for memory in open_window(self, 64)]
            self._others = [(r, flag) for r, flag in enumerate(self._flags) if r != self.rank]
        self._fences = came = self._fences + 1
        mine, last, brought = self._flags[self.rank], 1 + came % 2, status.brings
        mine[last] = brought
        mine[0] = came  # this rank is here
        for rank, flag in self._others:
            for _ in BRIEFLY:  # the others mostly come before a report could be asked for
                if flag[0] >= came:
                    break
            else:
                self._wait_at_fence(rank, flag, came, status)
            if flag[last] != brought:
                raise different_bytes(
                    (self.members[self.rank], brought), (self.members[rank], flag[last])
                )
        return True

    def _wait_at_fence(self, rank: int, flag: memoryview, came: int, status: Status) -> None:
        spins, awaited = 0, Awaited("meet at a fence with", (self.members[rank],), 0)
        status.since, status.waiting = self.clock(), awaited
        while flag[0] < came:
            spins += 1
            if self.patient:
                time.sleep(NAP)
            elif spins > SPINS:
                # more ranks than cores: the one we wait for may need this one
                os.sched_yield()
        status.waiting = None


def _complete(
    verb: Callable[..., Any], status: MPI.Status, array: Array, receives: bool, *message: Any
) -> bool:
    """Call MPI, and return whether a message is through; raise MismatchError if it does not fill
    its array.
    """
    try:
        done = verb(*message, status) is not False
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise
        raise MismatchError(
            f"a message is larger than the {array.nbytes} bytes of its buffer: {SAME}"
        ) from None
    if (
        done
        and receives
        and (got := status.Get_count(MPI.BYTE)) not in (array.nbytes, MPI.UNDEFINED)
    ):
        sizes = (
            f"sent {got} bytes, but the receive has a buffer of {array.nbytes} "
            f"({label(status.Get_tag())})"
        )
        raise MismatchError(f"rank {status.Get_source()} {sizes}: {SAME}")
    return done


def end_job(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback, each line marked with the rank, and end every rank of the job with status
    1.
    """
    if kind is not KeyboardInterrupt:
        tell(marked_traceback(MPI.COMM_WORLD.Get_rank(), error))
    abort()


def abort() -> None:
    """End every rank of the job with status 1."""
    time.sleep(0.2)  # the launcher drops what it has not yet read of this rank's output
    MPI.COMM_WORLD.Abort(1)


def world(limit: float) -> Communicator:
    """Return the communicator of all ranks that `mpirun` started, armed against hanging.

    Raises
    ------
    LaunchError
        If the launcher started several processes but each sees only itself: it belongs to another
        MPI.
    """
    started = int(first_set(*MPI_SIZES) or 1)
    if started > 1 and MPI.COMM_WORLD.Get_size() == 1:
        library = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())
        raise LaunchError(
            f"mpirun started {started} processes, but this Python speaks {library} and sees only "
            "itself: that mpirun belongs to another MPI. Start with `python -m minidist launch "
            f"-n {started} ...`, which finds the right one, or see `python -m minidist doctor`"
        )
    return wrap(MPI.COMM_WORLD, limit)


def wrap(mpi: MPI.Intracomm, limit: float) -> Communicator:
    """Return a communicator over an existing one of mpi4py, armed against hanging.

    An uncaught error in one rank would leave the others waiting for ever, so it ends the job.
    """
    own = Group(mpi.Dup())  # the caller's messages stay the caller's
    homes = mpi.allgather(host() if AVAILABLE else mpi.Get_rank())
    if mpi.Get_size() == MPI.COMM_WORLD.Get_size():  # now all ranks have started MPI
        take_names_away()
    comm = Communicator(MpiWire(own, tuple(range(mpi.Get_size())), homes, "world"), Ledger())
    if comm.size > 1:
        sys.excepthook = end_job
        mailbox = MpiMailbox(mpi.Dup())
        watchdog = Watchdog(mailbox, comm, limit, abort)
        atexit.register(_leave_together, watchdog, mailbox.mpi)
    return comm


def _leave_together(watchdog: Watchdog, mpi: MPI.Intracomm) -> None:
    """Answer that this rank has finished until all have: MPI_Finalize would wait too, but answer
    nobody.
    """
    watchdog.finished = True
    everyone = mpi.Ibarrier()
    while not everyone.Test():
        time.sleep(0.002)
    watchdog.stop()


class MpiMailbox:
    """Texts between watchdogs, on a communicator of their own."""

    def __init__(self, mpi: MPI.Intracomm):
        self.mpi = mpi
        self.sending: list[Any] = []

    def send(self, to: int, text: str) -> None:
        """Send, never blocking."""
        self.sending.append(self.mpi.isend(text, to))

    def receive(self) -> tuple[int, str] | None:
        """Return (sender, text) of a text that has come, or None."""
        status = MPI.Status()
        message = self.mpi.improbe(status=status)
        return None if message is None else (status.Get_source(), message.recv())
