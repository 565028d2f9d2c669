"""What simulated ranks share: unmatched messages, clocks, and the proof that nobody can go on.

Each *lane* is a thread of a rank: its main thread, or one that runs a stream. A send and a receive
meet in `post`; the second to arrive copies. A lane that has to wait says with a predicate what for.
When every lane that has not finished waits, and no predicate holds, then none ever will: nobody is
left to change one. That is the proof of a deadlock.

A rank that sleeps, or computes for ever, could still change one, so nothing is proved. Therefore no
rank may wait for another one longer than a limit, on this machine's clock: a lane that waits looks
at it each time that it looks again.
"""

import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

from minidist.comm.buffers import Array, copy, empty
from minidist.comm.errors import (
    CommunicationError,
    DeadlockError,
    LimitError,
    MismatchError,
    RankFailed,
)
from minidist.comm.report import label, user_line
from minidist.comm.threads_wire.cluster import Cluster
from minidist.comm.threads_wire.lanes import PATIENCE, ROUNDS, Lane, Operation, WaitsFor
from minidist.trace.events import SEND, EventKind

# seconds after which a waiting lane looks again: a thread may have ended without a word
PERIOD = 0.5


class World:
    """The meeting place of simulated ranks."""

    def __init__(
        self,
        ranks: int,
        cluster: Cluster | None = None,
        eager_limit: int = 0,
        limit: float = math.inf,
    ) -> None:
        self.cluster, self.eager_limit, self.limit = cluster, eager_limit, limit
        self.homes = [0 if cluster is None else cluster.node_of(rank) for rank in range(ranks)]
        self.lock = threading.RLock()
        # a fork that nobody holds any more takes its lane with it
        self.lanes: WeakSet[Lane] = WeakSet()
        self.unmatched: dict[tuple[str, int, int, int], deque[Operation]] = defaultdict(deque)
        self.shared: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self.failure: tuple[int, BaseException] | None = None
        self.progress = 0
        self.closed = False
        # threads that wait; all lanes that they use stand still
        self.blocked: set[threading.Thread | None] = set()
        self.bystanders = set(threading.enumerate())  # threads that were there before the ranks

    def add_lane(self, rank: int, name: str) -> Lane:
        """Register another thread of `rank`. Its clock starts at zero; whoever launches work on it
        moves the clock.
        """
        with self.lock:
            lane = Lane(rank, name, threading.Condition(self.lock))
            self.lanes.add(lane)
            return lane

    # ---------------------------------------------------------------- messages

    def post(
        self, lane: Lane, kind: EventKind, array: Array, key: tuple[str, int, int, int]
    ) -> Operation:
        """Post one end of a message; if the other is there, copy and complete both."""
        operation = Operation(
            self, lane, kind, array, key, lane.time, 0 < self.eager_limit >= array.nbytes
        )
        if kind is SEND:
            operation.departs = max(lane.time, lane.outgoing_free)
            if self.cluster is not None:  # the outgoing port is charged in the order of posting
                seconds = self.cluster.link(key[1], key[2]).seconds(array.nbytes)
                lane.outgoing_free = operation.departs + seconds
        with self.lock:
            self.raise_failure()
            self.progress += 1
            lane.polls, lane.thread = 0, threading.current_thread()
            queue = self.unmatched[key]
            if not queue or queue[0].kind is kind:
                if kind is SEND and operation.eager:
                    operation.array = _snapshot(array)
                    operation.done = True
                queue.append(operation)
                return operation
            partner = queue.popleft()
            if not queue:
                del self.unmatched[key]
        send, receive = (operation, partner) if kind is SEND else (partner, operation)
        if send.array.nbytes != receive.array.nbytes:
            _, sender, receiver, tag = key
            sizes = (
                f"sends {send.array.nbytes} bytes to rank {receiver}, which receives into a "
                "buffer of"
            )
            fix = f"{receive.array.nbytes} ({label(tag)}): give both the same shape and dtype"
            raise MismatchError(f"rank {sender} {sizes} {fix}")
        copy(receive.array, send.array)  # outside the lock: two pairs copy at once
        with self.lock:
            send.met, receive.met = receive.posted, send.departs
            send.done = receive.done = True
            if self.cluster is None:
                # it may be polling this message among others
                partner.lane.polls, partner.lane.released = 0, True
            partner.lane.wakeup.notify_all()
        return operation

    # ---------------------------------------------------------------- waiting, and the proof

    def wait(
        self, lane: Lane, ready: Callable[[], bool], waits_for: WaitsFor, idle: bool = False
    ) -> None:
        """Block `lane` until `ready()`; raise if that can never be."""
        with self.lock:
            if lane.ready is not None:
                fix = "give each its own, by fork(); what a stream runs communicates on stream.comm"
                raise CommunicationError(
                    f"two threads of rank {lane.rank} wait on one communicator at once: {fix}"
                )
            lane.thread = threading.current_thread()
            if ready():
                return
            lane.ready, lane.waits_for, lane.idle, lane.since = (
                ready,
                waits_for,
                idle,
                time.monotonic(),
            )
            self.blocked.add(lane.thread)
            try:
                while not ready():
                    self.raise_failure()
                    self._prove_progress()
                    if not ready():
                        self._keep_limit(lane)
                        lane.wakeup.wait(min(PERIOD, self.limit))
            finally:
                lane.ready, lane.idle = None, False
                self.blocked.discard(lane.thread)

    def poll(self, operation: Operation) -> bool:
        """Tell whether the other end of `operation` is posted; polling in vain for long counts as
        waiting.
        """
        lane = operation.lane
        if self.cluster is None and lane.polls < PATIENCE:
            lane.polls += 1
            self.raise_failure()
            return operation.done
        with self.lock:
            lane.polling, lane.released = True, False
            try:
                self.wait(lane, lambda: operation.done or lane.released, operation.waits_for)
            finally:
                lane.polling = False
            return operation.done if self.cluster is None else not lane.released

    def finish(self, lane: Lane) -> None:
        """Note that a lane has come to its end; those who wait for it may now wait in vain."""
        with self.lock:
            lane.finished = True
            if self.failure is None:
                with suppress(DeadlockError):  # it is the failure now
                    self._prove_progress()

    def abort(self, rank: int, error: BaseException) -> None:
        """Make every lane raise. The first failure is the one that counts."""
        with self.lock:
            if self.failure is None:
                self.failure = (rank, error)
            self.wake_all()

    def wake_all(self, blocking: bool = True) -> None:
        """Make every waiting lane look again. With `blocking=False`, never wait for the lock."""
        if self.lock.acquire(blocking):
            for lane in self.lanes:
                lane.wakeup.notify_all()
            self.lock.release()

    def raise_failure(self) -> None:
        """Raise if the job has failed or is over."""
        if self.failure is not None:
            rank, error = self.failure
            if isinstance(error, DeadlockError | LimitError):
                raise type(error)(*error.args)
            raise RankFailed(f"rank {rank} failed: {type(error).__name__}: {error}")
        if self.closed:
            raise CommunicationError("this run is over: its communicators cannot be used any more")

    def _prove_progress(self) -> None:
        """Raise DeadlockError if no lane can go on. Call with the lock held."""
        if any(not lane.finished and self._may_move(lane) for lane in self.lanes):
            return
        waiting = [
            lane
            for lane in self.lanes
            if not lane.finished and lane.ready is not None and not lane.idle
        ]
        released = [lane for lane in waiting if lane.polling and self._release(lane)]
        if waiting and not released:
            error = DeadlockError(self._report(waiting))
            self.abort(waiting[0].rank, error)
            raise error

    def _may_move(self, lane: Lane) -> bool:
        """Tell whether a lane runs, or is about to."""
        if lane.ready is not None:
            return lane.ready()
        if lane.thread is None:  # a thread that we have not met yet may be about to use it
            known = self.bystanders.union(
                other.thread for other in self.lanes if other.thread is not None
            )
            return not known.issuperset(threading.enumerate())
        return lane.thread not in self.blocked and lane.thread.is_alive()

    def _release(self, lane: Lane) -> bool:
        """Let a poller go on with "not yet", unless it has heard that often enough since anything
        was posted.
        """
        if lane.seen != self.progress:
            lane.seen, lane.vain = self.progress, 0
        lane.vain += 1
        lane.released = lane.vain < (2 if self.cluster is None else ROUNDS + len(self.unmatched))
        if self.cluster is None:
            lane.polls = 0
        lane.wakeup.notify_all()
        return lane.released

    def _keep_limit(self, lane: Lane) -> None:
        """Raise LimitError if a lane has waited too long for another rank. Call with the lock held.

        A rank may wait for its own streams as long as they work: they say themselves whom they wait
        for.
        """
        waited = time.monotonic() - lane.since
        if lane.idle or lane.waits_for[1] == lane.rank or waited <= self.limit:
            return
        lines = [
            f"rank {lane.rank} has waited {waited:.1f} s, longer than one operation may (limit "
            f"{self.limit:g} s). Who waits for whom:"
        ]
        frames = sys._current_frames()
        for other in sorted(self.lanes, key=lambda lane: (lane.rank, lane.name)):
            # on a lane that says so
            waits_elsewhere = other.ready is None and other.thread in self.blocked
            if (state := _state(other)) and not waits_elsewhere:
                lines.append(f"  rank {other.rank}{other.name} {state}{_line(other, frames)}")
        error = LimitError("\n".join(lines))
        self.abort(lane.rank, error)
        raise error

    def _report(self, waiting: list[Lane]) -> str:
        """Say who waits for whom, and close the cycle or the chain."""
        waiting.sort(key=lambda lane: (lane.rank, lane.name))
        frames = sys._current_frames()
        lines = ["no rank can go on."]
        for lane in waiting:
            lines.append(
                f"  rank {lane.rank}{lane.name} waits: {lane.waits_for[0]}{_line(lane, frames)}"
            )
        edges = {lane.rank: lane.waits_for[1] for lane in waiting if lane.waits_for[1] is not None}
        chain = [waiting[0].rank]
        while (peer := edges.get(chain[-1])) is not None and peer not in chain:
            chain.append(peer)
        if peer is not None:
            chain = [*chain[chain.index(peer) :], peer]
            lines.append("  each waits for the next: " + " -> ".join(map(str, chain)))
        elif chain[-1] not in {lane.rank for lane in waiting}:
            lines.append(
                "  rank " + " waits for rank ".join(map(str, chain)) + ", which has finished"
            )
        return "\n".join(lines)


def _state(lane: Lane) -> str:
    """Say what a lane does now; nothing of a stream without work."""
    if lane.finished:
        return "has finished"
    if lane.ready is not None:
        seconds = time.monotonic() - lane.since
        return "" if lane.idle else f"waits {seconds:.1f} s: {lane.waits_for[0]}"
    return "computes" if lane.thread is not None and lane.thread.is_alive() else ""


def _line(lane: Lane, frames: dict[int, FrameType]) -> str:
    """Return where in its user's program a lane stands; nothing if it has finished."""
    if lane.thread is None or lane.finished:
        return ""
    return user_line(frames.get(lane.thread.ident or 0))


def _snapshot(array: Array) -> Array:
    taken = empty(array, len(array))
    copy(taken, array)
    return taken
