"""The `threads` wire: ranks are threads of this process, and nothing but Python is needed.

    minidist.run(program, ranks=4)                                      on this machine's clock
    minidist.run(program, ranks=64, cluster=Cluster.h100(nodes=8))      on the virtual clock of 64 modelled GPUs

Sends wait for their receive, however small (`eager_limit` raises that): a program that works here
does not work by luck.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from minidist.comm.agree import debug_mode
from minidist.comm.buffers import Array, device_name
from minidist.comm.communicator import Communicator
from minidist.comm.errors import RankFailed
from minidist.comm.job.background import WorkingThread
from minidist.comm.job.limit import time_limit
from minidist.comm.ledger import Ledger
from minidist.comm.threads_wire.cluster import Cluster
from minidist.comm.threads_wire.first_calls import call_once
from minidist.comm.threads_wire.lanes import Lane, Operation
from minidist.comm.threads_wire.world import World
from minidist.comm.wire import Wire
from minidist.trace import Trace
from minidist.trace.events import RECEIVE, SEND, EventKind

Result = TypeVar("Result")


class ThreadsWire(Wire):
    """Messages between threads of one process, which meet in a `World`."""

    kind, one_process = "threads", True

    def __init__(
        self, world: World, lane: Lane, rank: int, members: tuple[int, ...], name: str = "world"
    ) -> None:
        super().__init__(rank, members, name, world.homes)
        self.world, self.lane = world, lane
        self._roll_calls = itertools.count()

    def isend(self, array: Array, to: int, tag: int) -> Operation:
        return self._post(SEND, array, (self.name, self.members[self.rank], self.members[to], tag))

    def irecv(self, array: Array, source: int, tag: int) -> Operation:
        return self._post(
            RECEIVE, array, (self.name, self.members[source], self.members[self.rank], tag)
        )

    def _post(self, kind: EventKind, array: Array, key: tuple[str, int, int, int]) -> Operation:
        if device_name(array) == "cuda":
            raise ValueError(
                "simulated ranks share no GPU: move the buffer to the CPU, or start with torchrun"
            )
        return self.world.post(self.lane, kind, array, key)

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> ThreadsWire:
        lane = (
            self.world.add_lane(self.members[self.rank], name.removeprefix("world"))
            if for_thread
            else self.lane
        )
        return ThreadsWire(
            self.world,
            lane,
            mine.index(self.rank),
            tuple(self.members[rank] for rank in mine),
            name,
        )

    def among(self, mine: list[int], name: str) -> ThreadsWire:
        return self.derive([mine], mine, name)  # which asks nobody

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        mine = np.zeros(bytes, np.uint8)
        everyones = self.roll_call(mine)
        return mine, everyones if len(self.nodes()[0]) == self.size else []

    def roll_call(self, answer: Any) -> list[Any]:
        place = (self.name, next(self._roll_calls))
        with self.world.lock:
            table = self.world.shared[place]
            table[self.rank] = answer
            if len(table) == self.size:  # nobody waits for less
                self.world.wake_all()
        missing = next((self.members[r] for r in range(self.size) if r not in table), None)
        self.world.wait(
            self.lane,
            lambda: len(table) == self.size,
            ("all ranks to come to a roll call", missing),
        )
        self.world.shared.pop(place, None)  # all ranks hold the table by now
        return [table[rank] for rank in range(self.size)]

    def reach(self, bytes: int, peer: int) -> None:
        if self.world.cluster is not None:
            link = self.world.cluster.link(self.members[peer], self.members[self.rank])
            self.advance(link.latency + link.seconds(bytes))

    def clock(self) -> float:
        return time.perf_counter() if self.world.cluster is None else self.lane.time

    def advance(self, seconds: float) -> None:
        if self.world.cluster is not None:
            self.lane.polls = 0
            self.lane.time += seconds

    def fail(self, error: BaseException) -> None:
        self.world.abort(self.members[self.rank], error)

    def wait_until(self, ready: Callable[[], bool], what: str, idle: bool = False) -> None:
        self.world.wait(self.lane, ready, (what, self.members[self.rank]), idle)

    def wake(self, blocking: bool = True) -> None:
        self.world.wake_all(blocking)


def alone() -> Communicator:
    """Return the communicator of a process that was started alone."""
    world = World(1)
    return Communicator(ThreadsWire(world, world.add_lane(0, ""), 0, (0,)), Ledger())


def run(
    fn: Callable[[Communicator], Result],
    ranks: int,
    *,
    cluster: Cluster | None = None,
    eager_limit: int = 0,
    limit: float | None = None,
    debug: bool | None = None,
    trace: Trace | None = None,
) -> list[Result]:
    """Call `fn(comm)` on each of `ranks` simulated ranks and return their results, by rank.

    Parameters
    ----------
    cluster : Cluster, optional
        Model this machine: `comm.clock()` is then virtual time, the same in every run.
    eager_limit : int
        Sends of up to so many bytes do not wait for their receive.
    limit : float, optional
        Seconds on this machine's clock that a rank may wait for another one. Default:
        MINIDIST_LIMIT, or 300.
    debug : bool, optional
        Have every collective compare what the ranks call before it starts. Default: whether
        MINIDIST_DEBUG is set.
    trace : Trace, optional
        Record events there.

    Raises
    ------
    DeadlockError
        When every rank waits for what cannot come.
    LimitError
        When a rank has waited longer than the limit: it says who waits for whom, and what the
        others do, at which line.
    LaunchError
        If the limit is no time.
    Exception
        Whatever a rank raised first, with a note that names the rank. The other ranks are stopped.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: start at least 1")
    if cluster is not None:
        cluster.check(ranks)
    world = World(ranks, cluster, eager_limit, time_limit(limit))
    results: list[Any] = [None] * ranks
    threads = []
    for rank in range(ranks):
        wire = ThreadsWire(world, world.add_lane(rank, ""), rank, tuple(range(ranks)))
        wire.lane.thread = threading.current_thread()  # which is about to start the rank's own
        comm = Communicator(wire, Ledger(trace, debug_mode(debug)))
        threads.append(WorkingThread(_run_rank, wire, comm, fn, results, name=f"rank {wire.rank}"))
    if ranks > 1:
        call_once()
    try:
        for thread in threads:
            thread.start()
        _join(threads, world)
    except BaseException as error:  # Ctrl-C, most likely
        world.abort(-1, error)
        raise
    with world.lock:
        world.closed = True
        world.wake_all()
    if world.failure is not None:
        rank, cause = world.failure
        if not isinstance(cause, RankFailed):
            cause.add_note(f"[rank {rank}] raised this")
        raise cause
    return results


def _run_rank(
    wire: ThreadsWire, comm: Communicator, fn: Callable[[Communicator], Any], results: list[Any]
) -> None:
    wire.lane.thread = threading.current_thread()
    try:
        results[wire.rank] = fn(comm)
    except BaseException as error:
        wire.world.abort(wire.rank, error)
    finally:
        wire.world.finish(wire.lane)


def _join(threads: list[WorkingThread], world: World) -> None:
    for thread in threads:
        while thread.is_alive() and world.failure is None:
            thread.join(0.2)  # in slices: an untimed join would not notice Ctrl-C everywhere
    # ranks that compute get a second to come to their next message
    deadline = time.monotonic() + 1.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
