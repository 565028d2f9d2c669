"""The `threads` wire: ranks are threads of this process, and nothing but Python is needed.

    minidist.run(program, ranks=4)                                      on this machine's clock
    minidist.run(program, ranks=64, cluster=Cluster.h100(nodes=8))      on the virtual clock of 64 modelled GPUs
    minidist.run(program, ranks=64, engine="cooperative", seed=7)       one at a time, in an order that can be repeated

Which engine? `threads` for programs that work: it needs nothing, and long products run at once.
`cooperative` to repeat a failure, to look for a race, or for many ranks. Values, bytes, messages and
the virtual clock are the same.

Sends wait for their receive, however small (`eager_limit` raises that): a program that works here
does not work by luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from minidist.full.comm.agree import debug_mode
from minidist.full.comm.buffers import Array
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import DeadlockError, LimitError, RankFailed, different_bytes, whole
from minidist.full.comm.job.limit import time_limit
from minidist.full.comm.ledger import Ledger, Status
from minidist.full.comm.threads_wire.carriers.carrier import Work
from minidist.full.comm.threads_wire.carriers.engines import carrier_of
from minidist.full.comm.threads_wire.cluster import Cluster
from minidist.full.comm.threads_wire.first_calls import call_once
from minidist.full.comm.threads_wire.group import Group, RollCall
from minidist.full.comm.threads_wire.lanes import Lane, Operation, Until
from minidist.full.comm.threads_wire.world import World
from minidist.full.comm.wire import Wire
from minidist.full.trace import Trace
from minidist.full.trace.events import RECEIVE, SEND

Result = TypeVar("Result")


class ThreadsWire(Wire):
    """Messages between threads of one process, which meet in a `World`."""

    kind, one_process = "threads", True

    def __init__(self, world: World, lane: Lane, group: Group, name: str = "world") -> None:
        super().__init__(group.places[lane.rank], group.members, name, world.homes)
        self.world = world
        self.lane = lane
        self.group = group
        self._roll_calls = itertools.count()
        self._fences = itertools.count()

    def isend(self, array: Array, to: int, tag: int) -> Operation:
        key = (self.name, self.lane.rank, self.members[to], tag)
        return self.world.post(self.lane, SEND, array, key)

    def irecv(self, array: Array, source: int, tag: int) -> Operation:
        key = (self.name, self.members[source], self.lane.rank, tag)
        return self.world.post(self.lane, RECEIVE, array, key)

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> ThreadsWire:
        world = self.world
        rank = self.members[self.rank]
        lane = world.add_lane(rank, name.removeprefix("world")) if for_thread else self.lane
        key = (name, self.members[mine[0]])  # groups that have no rank in common may share a name
        group = world.group(key, lambda: tuple(self.members[rank] for rank in mine))
        return ThreadsWire(world, lane, group, name)

    def among(self, mine: list[int], name: str) -> ThreadsWire:
        return self.derive([mine], mine, name)  # which asks nobody

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        mine = np.zeros(bytes, np.uint8)
        everyones = self.all_gather_object(mine)
        return mine, everyones if len(self.nodes()[0]) == self.size else []

    def fence(self, status: Status) -> bool:
        rank = self.members[self.rank]
        brings = status.brings
        number = next(self._fences)
        with self.world.lock:
            first, its = self.group.come_to_fence(number, rank, brings)
        if its != brings:
            raise different_bytes((rank, brings), (first, its))
        return False

    def nodes(self) -> list[tuple[int, ...]]:
        if self.group.nodes is None:
            self.group.nodes = super().nodes()
        return self.group.nodes

    def all_gather_object(self, answer: Any) -> list[Any]:
        return list(self._call(answer).answers)

    def conclude(self, answer: Any, decide: Callable[[list[Any]], Any]) -> Any:
        call = self._call(answer)
        with self.world.lock:
            return call.conclude(decide)

    def _call(self, answer: Any) -> RollCall:
        place = (self.name, next(self._roll_calls))
        return self.world.all_gather_object(self.lane, place, self.group, answer)

    def reach(self, bytes: int, peer: int) -> None:
        if self.world.cluster is not None:
            link = self.world.cluster.link(self.members[peer], self.members[self.rank])
            self.advance(link.latency + link.seconds(bytes))
        self.hand_over()

    def hand_over(self) -> None:
        self.world.pause()

    def clock(self) -> float:
        if self.world.cluster is None:
            return self.world.machine_time()
        return self.lane.time

    def advance(self, seconds: float) -> None:
        if self.world.cluster is not None:
            self.lane.polls = 0
            self.lane.time += seconds

    def fail(self, error: BaseException) -> None:
        self.world.abort(self.members[self.rank], error)

    def wait_until(
        self, ready: Callable[[], bool], what: str, idle: bool = False, others: bool = False
    ) -> None:
        event = Until(ready, what, None if others else self.members[self.rank])
        self.world.wait(self.lane, event, idle)

    def wake(self, blocking: bool = True) -> None:
        self.world.wake_rank(self.members[self.rank], blocking)

    def start(self, work: Callable[[], None], name: str) -> None:
        self.world.carrier.start(Work(name, work))


def alone() -> Communicator:
    """Return the communicator of a process that was started alone."""
    world = World(1)
    lane = world.add_lane(0, "")
    wire = ThreadsWire(world, lane, Group((0,)))
    return Communicator(wire, Ledger())


def run(
    fn: Callable[[Communicator], Result],
    ranks: int,
    *,
    cluster: Cluster | None = None,
    eager_limit: int = 0,
    limit: float | None = None,
    debug: bool | None = None,
    trace: Trace | None = None,
    engine: str | None = None,
    seed: int | None = None,
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
    engine : str, optional
        `threads`, the default: all ranks run at once. `cooperative`: exactly one runs, and hands over only where
        it waits, polls, or calls `comm.hand_over()`; on threads that pass a baton, so any program
        works. `browser`: the same
        order in Pyodide, where it is the only one, and the default; nothing can interrupt a rank
        there, so `limit` ends none that computes.
    seed : int, optional
        Of a cooperative engine: draws who goes on at each hand-over. The same seed makes the same
        interleaving, and the same trace. Default: 0.

    Raises
    ------
    DeadlockError
        When every rank waits for what cannot come.
    LimitError
        When a rank has waited longer than the limit: it says who waits for whom, and what the
        others do, at which line.
    LaunchError
        If the limit is no time, or the browser cannot suspend a rank.
    ValueError, TypeError
        If there is no such engine here, or a seed says nothing for it; if the ranks are
        none, or too many for the cluster; if an argument is of another kind.
    Exception
        Whatever a rank raised first, with a note that names the rank. The others are stopped.
    """
    ranks = check_arguments(ranks, cluster, eager_limit)
    if not isinstance(trace, Trace | None):
        raise TypeError(f"trace={trace!r:.60} is no trace: give a minidist.Trace()")
    longest = time_limit(limit)
    carrier = carrier_of(engine, seed, longest)
    world = World(ranks, cluster, eager_limit, longest, carrier)
    compares = debug_mode(debug)
    return carry(fn, world, lambda: Ledger(trace, compares))


def check_arguments(ranks: int, cluster: Cluster | None, eager_limit: int) -> int:
    """Return the number of ranks; raise TypeError or ValueError unless they can be simulated so."""
    ranks = whole("ranks", ranks, least=1)
    whole("eager_limit", eager_limit, least=0)
    if not isinstance(cluster, Cluster | None):
        raise TypeError(
            f"cluster={cluster!r:.60} is no cluster: give one, as Cluster.h100(nodes=1)"
        )
    if cluster is not None:
        cluster.check(ranks)
    return ranks


def carry(
    fn: Callable[[Communicator], Result], world: World, ledger: Callable[[], Ledger]
) -> list[Result]:
    """Call `fn(comm)` on each rank of a world, with a ledger each; return and raise as `run`."""
    ranks = len(world.homes)
    results: list[Any] = [None] * ranks
    group = Group(tuple(range(ranks)))
    works = []
    for rank in range(ranks):
        lane = world.add_lane(rank, "")
        wire = ThreadsWire(world, lane, group)
        comm = Communicator(wire, ledger())
        do = partial(_run_rank, wire, comm, fn, results)
        works.append(Work(f"rank {rank}", do))
    if ranks > 1:
        call_once()
    try:
        world.carrier.carry(works, world)
    except BaseException as error:  # Ctrl-C, most likely
        world.abort(-1, error)
        raise
    if world.failure is not None:
        rank, cause = world.failure
        if rank >= 0 and not isinstance(cause, RankFailed | DeadlockError | LimitError):
            cause.add_note(f"[rank {rank}] raised this")
        raise cause
    return results


def _run_rank(
    wire: ThreadsWire, comm: Communicator, fn: Callable[[Communicator], Any], results: list[Any]
) -> None:
    wire.lane.thread = wire.world.carrier.here()
    try:
        results[wire.rank] = fn(comm)
    except BaseException as error:
        wire.world.abort(wire.rank, error)
    finally:
        wire.world.finish(wire.lane)
