"""What simulated ranks share: unmatched messages, clocks, and the proof that nobody can go on.

Each *lane* is a thread of a rank: its main thread, or one that runs a stream. A send and a receive
meet in `post`; the second to arrive copies. A lane that has to wait says with a predicate what for,
and whoever makes a predicate true wakes the lane. The carrier of the ranks counts who may still
act: at each wait that is asked first, and costs the same however many ranks there are. Only when
nobody may, all lanes are looked at: when every lane that has not finished waits, and no predicate
holds, then none ever will: nobody is left to change one. That is the proof of a deadlock.

A rank that sleeps, or computes for ever, could still change one, so nothing is proved. Therefore no
rank may wait for another one longer than a limit, on this machine's clock.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from minidist.full.comm.buffers import Array, Nowhere, copy, device_name, dtype_name, empty
from minidist.full.comm.errors import (
    CommunicationError,
    DeadlockError,
    LimitError,
    MismatchError,
    RankFailed,
    different_dtypes,
)
from minidist.full.comm.report import label
from minidist.full.comm.threads_wire.carriers.carrier import Carrier
from minidist.full.comm.threads_wire.carriers.threads import Threads
from minidist.full.comm.threads_wire.cluster import Cluster
from minidist.full.comm.threads_wire.group import Group, RollCall
from minidist.full.comm.threads_wire.lanes import PATIENCE, ROUNDS, Event, Lane, Operation, Poll
from minidist.full.comm.threads_wire.standstill import calls, deadlock, over_limit, waits_for
from minidist.full.trace.events import SEND, EventKind


class World:
    """The meeting place of simulated ranks."""

    def __init__(
        self,
        ranks: int,
        cluster: Cluster | None = None,
        eager_limit: int = 0,
        limit: float = math.inf,
        carrier: Carrier | None = None,
    ) -> None:
        self.cluster, self.eager_limit, self.limit = cluster, eager_limit, limit
        self.carrier = carrier or Threads(limit)
        self.lock = self.carrier.lock
        self.homes = [0 if cluster is None else cluster.node_of(rank) for rank in range(ranks)]
        # of each rank, by number; a fork that nobody holds any more takes its lane with it
        self.lanes_of: list[WeakValueDictionary[int, Lane]] = [
            WeakValueDictionary() for _ in range(ranks)
        ]
        self.made = 0
        # lists, which are made faster than deques: hardly one ever holds a second message
        self.unmatched: dict[tuple[str, int, int, int], list[Operation]] = {}
        self.roll_calls: dict[tuple[str, int], RollCall] = {}
        # that some of their ranks have still to ask for
        self.groups: dict[tuple[str, int], Group] = {}
        self.pollers: dict[int, Lane] = {}  # that wait, and may be told "not yet"
        self.failure: tuple[int, BaseException] | None = None
        self.progress = 0
        self.closed = False
        self.latest = 0.0  # time that was told

    def add_lane(self, rank: int, name: str) -> Lane:
        """Register another thread of `rank`. Its clock starts at zero; whoever launches work on it
        moves the clock.
        """
        with self.lock:
            lane = Lane(rank, name)
            self.made += 1
            self.lanes_of[rank][self.made] = lane
            return lane

    def machine_time(self) -> float:
        """Return this machine's time. It is later than at the call before, even where the machine's
        clock ticks so slowly that several messages fall into one tick, as in a browser.
        """
        self.latest = max(time.perf_counter(), math.nextafter(self.latest, math.inf))
        return self.latest

    def lanes(self) -> Iterator[Lane]:
        """Yield the lanes of all ranks, always in the same order."""
        for lanes in self.lanes_of:
            yield from list(lanes.values())

    # ---------------------------------------------------------------- messages

    def post(
        self, lane: Lane, kind: EventKind, array: Array, key: tuple[str, int, int, int]
    ) -> Operation:
        """Post one end of a message; if the other is there, copy and complete both."""
        if type(array) is not Nowhere and device_name(array) == "cuda":
            raise ValueError(
                "simulated ranks share no GPU: move the buffer to the CPU, or start with torchrun"
            )
        bytes = array.nbytes
        eager = 0 < self.eager_limit >= bytes
        operation = Operation(self, lane, kind, array, key, bytes, lane.time, eager)
        if kind is SEND:
            operation.departs = max(lane.time, lane.outgoing_free)
            if self.cluster is not None:  # the outgoing port is charged in the order of posting
                link = operation.link = self.cluster.link(key[1], key[2])
                lane.outgoing_free = operation.departs + link.seconds(bytes)
        with self.lock:
            if self.failure is not None or self.closed:
                self.raise_failure()
            self.progress += 1
            lane.polls, here = 0, self.carrier.here()
            if lane.awaits is None:  # or another thread, which waits, is in the middle of using it
                lane.thread = here
            queue = self.unmatched.get(key)
            if queue is None or queue[0].kind is kind:
                if kind is SEND and eager:
                    operation.array = _snapshot(array)
                    operation.done = True
                if queue is None:
                    self.unmatched[key] = [operation]
                else:
                    queue.append(operation)
                return operation
            partner = queue.pop(0)
            if not queue:
                del self.unmatched[key]
        send, receive = (operation, partner) if kind is SEND else (partner, operation)
        if send.bytes != receive.bytes:
            _, sender, receiver, _ = key
            raise MismatchError(
                f"rank {sender} sends {send.bytes} bytes to rank {receiver}, which receives into a "
                f"buffer of {receive.bytes} ({self._calls(key)}): give both the same "
                "shape and dtype"
            )
        if send.array.dtype != receive.array.dtype:
            self._check_dtypes(send, receive)
        copy(receive.array, send.array)  # outside the lock: two pairs copy at once
        with self.lock:
            send.met, receive.met, receive.link = receive.posted, send.departs, send.link
            send.done = receive.done = True
            if self.cluster is None:
                # it may be polling this message among others
                partner.lane.polls, partner.lane.released = 0, True
            self._wake(partner.lane)
        return operation

    def _check_dtypes(self, send: Operation, receive: Operation) -> None:
        """Refuse a message whose bytes its receiver would read as other numbers."""
        _, sender, receiver, _ = key = send.key
        sent, received = dtype_name(send.array), dtype_name(receive.array)
        if sent != received:
            raise different_dtypes(sender, sent, receiver, received, self._calls(key))

    def _calls(self, key: tuple[str, int, int, int]) -> str:
        """Return a message's tag, and the calls and lines that its two ranks are in."""
        _, sender, receiver, tag = key
        lanes = [*self.lanes_of[sender].values(), *self.lanes_of[receiver].values()]
        return label(tag) + calls(lanes, self.carrier)

    def all_gather_object(
        self, lane: Lane, place: tuple[str, int], ranks: Group, answer: Any
    ) -> RollCall:
        """Bring this rank's answer, and return the roll call once all ranks of the group have."""
        with self.lock:
            call = self.roll_calls.get(place)
            if call is None:
                call = self.roll_calls[place] = RollCall(ranks)
            if call.bring(lane, answer):  # nobody waits for less
                del self.roll_calls[place]
                for other in call.lanes:
                    self._wake(other)
        self.wait(lane, call)
        return call

    def group(self, name: tuple[str, int], members: Callable[[], tuple[int, ...]]) -> Group:
        """Return the one description of a group, which all its ranks ask for once, and share."""
        with self.lock:
            group = self.groups.get(name)
            if group is None:
                group = self.groups[name] = Group(members())
            group.absent -= 1
            if not group.absent:
                del self.groups[name]
            return group

    # ---------------------------------------------------------------- waiting, and the proof

    def wait(
        self,
        lane: Lane,
        event: Event,
        idle: bool = False,
    ) -> None:
        """Block `lane` until the event is ready; raise if that can never be."""
        carrier = self.carrier
        with self.lock:
            if lane.awaits is not None:
                fix = "give each its own, by fork(); what a stream runs communicates on stream.comm"
                raise CommunicationError(
                    f"two threads of rank {lane.rank} wait on one communicator at once: {fix}"
                )
            lane.thread = carrier.here()
            if event.ready():
                return
            lane.awaits, lane.idle, lane.since = event, idle, time.monotonic()
            try:
                while not event.ready():
                    carrier.stands(lane)
                    if self.failure is not None or self.closed:
                        self.raise_failure()
                    self._prove_progress()
                    if not event.ready():
                        if carrier.comes_back:
                            self._keep_limit(lane, time.monotonic() - lane.since)
                        carrier.park(lane)
            finally:
                lane.awaits, lane.idle = None, False
                carrier.goes_on(lane)

    def poll(self, operation: Operation) -> bool:
        """Tell whether the other end of `operation` is posted; polling in vain for long counts as
        waiting.
        """
        lane = operation.lane
        if operation.done:  # it is asked only where others may go on at every call
            self.pause()
            return True
        if self.cluster is None and lane.polls < PATIENCE:
            lane.polls += 1
            self.pause()
            return operation.done
        with self.lock:
            lane.released = False
            self.pollers[id(lane)] = lane
            try:
                self.wait(lane, Poll(operation))
            finally:
                del self.pollers[id(lane)]
            return operation.done if self.cluster is None else not lane.released

    def pause(self) -> None:
        """Let other ranks go on, where the carrier does not by itself."""
        with self.lock:
            self.carrier.pause()
        self.raise_failure()

    def finish(self, lane: Lane) -> None:
        """Note that a lane has come to its end; those who wait for it may now wait in vain."""
        with self.lock:
            lane.finished = True
            self.carrier.left(lane)
            self.prove()

    def prove(self) -> None:
        """Make every lane raise if none can go on. Call with the lock held."""
        if self.failure is None:
            with suppress(DeadlockError):  # it is the failure now
                self._prove_progress()

    def abort(self, rank: int, error: BaseException) -> None:
        """Make every lane raise. The first failure is the one that counts; when all ranks have
        ended, what a stream still does fails nothing any more.
        """
        with self.lock:
            if self.failure is None and not self.closed:
                self.failure = (rank, error)
            self._wake_everybody()

    def close(self) -> None:
        """End the run: no lane may wait or communicate any more."""
        with self.lock:
            self.closed = True
            self._wake_everybody()

    def _wake_everybody(self) -> None:
        for lane in self.lanes():
            if lane.awaits is not None:
                self.carrier.wake_late(lane)

    def _wake(self, lane: Lane) -> None:
        """Wake a lane that may go on now. Call with the lock held."""
        if lane.awaits is not None and lane.awaits.ready():
            self.carrier.wake(lane)

    def wake_rank(self, rank: int, blocking: bool = True) -> None:
        """Wake the lanes of a rank that may go on now. With `blocking=False`, never wait for the
        lock: the garbage collector may call this at any moment.
        """
        lanes = list(self.lanes_of[rank].values())
        if blocking:
            with self.lock:
                for lane in lanes:
                    self._wake(lane)
        else:
            for lane in lanes:
                if lane.awaits is not None and lane.awaits.ready():
                    self.carrier.wake_late(lane)

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
        if self.carrier.somebody_runs():
            return
        released = [lane for lane in list(self.pollers.values()) if self._release(lane)]
        if released:
            return
        lanes = [lane for lane in self.lanes() if not lane.finished]
        unused = any(lane.thread is None for lane in lanes)
        if unused and self.carrier.strangers():  # one may be about to use it
            return
        if any(lane.awaits is not None and lane.awaits.ready() for lane in lanes):
            return
        waiting = [lane for lane in lanes if lane.awaits is not None and not lane.idle]
        if waiting:
            error = DeadlockError(deadlock(waiting, self.carrier))
            self.abort(waiting[0].rank, error)
            raise error

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
        if lane.released:
            self.carrier.wake(lane)
        return lane.released

    def keep_limit(self, running: str, seconds: float, others: bool) -> None:
        """Fail if anybody waits that `running` has not let go on for so many seconds, the limit;
        `others`: somebody could, and has no turn.
        """
        with self.lock:
            if others or any(self._waits_for_another(lane) for lane in self.lanes()):
                start = f"{running} has run for {seconds:.1f} s and handed over to nobody"
                self.abort(-1, self._over_limit(start))

    def _waits_for_another(self, lane: Lane) -> bool:
        return lane.awaits is not None and not lane.idle and waits_for(lane)[1] != lane.rank

    def _over_limit(self, start: str) -> LimitError:
        return LimitError(over_limit(start, self.limit, self.lanes(), self.carrier))

    def _keep_limit(self, lane: Lane, waited: float) -> None:
        """Raise LimitError if a lane has waited too long for another rank. Call with the lock held.

        A rank may wait for its own streams as long as they work: they say themselves whom they wait
        for.
        """
        if waited <= self.limit or not self._waits_for_another(lane):
            return
        error = self._over_limit(f"rank {lane.rank} has waited {waited:.1f} s")
        self.abort(lane.rank, error)
        raise error


def _snapshot(array: Array) -> Array:
    taken = empty(array, len(array))
    copy(taken, array)
    return taken
