"""One lane of one simulated rank, and one message it posted; the virtual clock is here.

Posting costs nothing. A message leaves when the sender's outgoing port is free, occupies it for
bytes/bandwidth, and occupies the receiver's incoming port as long; it has arrived `latency` later.
The incoming port is charged in the order in which the receiver *waits*, which its program alone
decides: which thread was faster on this machine never matters, and a receive that is posted early
delays no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from minidist.full.comm.buffers import Array
from minidist.full.comm.ledger import Awaited
from minidist.full.comm.threads_wire.cluster import Cluster, Link
from minidist.full.trace.events import SEND, EventKind

PATIENCE = 10_000  # fruitless polls in a row after which polling counts as waiting
# times that a poller on the virtual clock hears "not yet" while nobody posts anything
ROUNDS = 1_000


WaitsFor: TypeAlias = tuple[str, int | None]  # in words, and the rank


class Event(Protocol):
    """What a lane waits for."""

    def ready(self) -> bool:
        """Tell whether the lane may go on."""

    def waits_for(self) -> WaitsFor:
        """Say what for, in words, and for which rank. Only reports ask."""


@dataclass(eq=False)
class Until:
    """Something that another lane of the rank makes true, or with no `rank` any other rank."""

    holds: Callable[[], bool]
    what: str
    rank: int | None

    def ready(self) -> bool:
        """Tell whether it is true."""
        return self.holds()

    def waits_for(self) -> WaitsFor:
        """Say what for."""
        return self.what, self.rank


@dataclass(eq=False)
class Lane:
    """One thread of one rank: what it waits for, its clock and its two ports."""

    rank: int
    name: str
    wakeup: Any = None  # what its carrier wakes it with
    time: float = 0.0
    outgoing_free: float = 0.0
    incoming_free: float = 0.0
    awaits: Event | None = None  # while it waits
    since: float = 0.0  # when it began to wait, on this machine's clock
    idle: bool = False  # a stream without work keeps nobody waiting
    polls: int = 0
    released: bool = False  # a poll: it may go on with "not yet", as nobody else can move
    seen: int = -1  # what the world had posted when it was last released
    vain: int = 0  # how often it was released since
    finished: bool = False
    # what runs it, a thread or a task of a carrier; None if it was forked and nobody has used it
    thread: Any = None


class Meeting(Protocol):
    """Where ranks meet, as one message sees it; see `World`."""

    cluster: Cluster | None
    closed: bool
    failure: tuple[int, BaseException] | None

    def wait(self, lane: Lane, event: Event) -> None: ...

    def poll(self, operation: Operation) -> bool: ...


@dataclass(eq=False, slots=True)  # one is made for each end of a message
class Operation:
    """One posted send or receive."""

    world: Meeting
    lane: Lane
    kind: EventKind
    array: Array
    key: tuple[str, int, int, int]  # communicator, sender, receiver, tag
    bytes: int
    posted: float
    eager: bool  # the send goes ahead of its receive
    link: Link | None = None  # on a modelled cluster, once both ends are there; a send's at once
    departs: float = 0.0
    met: float = 0.0  # when the other end was ready: a receive posted, a send departing
    done: bool = False
    completed: float | None = None

    def wait(self) -> None:
        """Block until this end is complete."""
        if not self.done:
            self.world.wait(self.lane, self)
        lane, arrival = self.lane, self.arrival()
        lane.polls = 0
        if arrival > lane.time:
            lane.time = arrival

    def test(self) -> bool:
        """Tell whether this end is complete by now.

        On the virtual clock "not yet" must not depend on this machine's threads: the answer waits
        until the other end is posted, or until nobody else can move.
        """
        if not self.done and not self.world.poll(self):
            return False
        if self.arrival() > self.lane.time and self.lane.polls < PATIENCE:
            self.lane.polls += 1
            self.lane.vain = 0  # something is on its way
            return False
        self.lane.time = max(self.lane.time, self.arrival())  # who spins without computing, waits
        return True

    def ready(self) -> bool:
        """Tell whether both ends have met."""
        return self.done

    def drop(self) -> bool:
        """Tell whether this end is complete, or its run is over."""
        return self.done or self.world.closed or self.world.failure is not None

    def waits_for(self) -> WaitsFor:
        """What its waiter waits for, in words, and the rank."""
        _, sender, receiver, tag = self.key
        peer, what = (receiver, "send to") if self.kind is SEND else (sender, "receive from")
        return str(Awaited(what, (peer,), tag, self.bytes)), peer

    def arrival(self) -> float:
        """Return when this end is complete, in virtual time, charging the incoming port on the
        first call.
        """
        if self.completed is None:
            link = self.link
            if link is None or (self.kind is SEND and self.eager):
                self.completed = self.posted
            else:
                assert self.done, "a message completes only when both ends are there"
                seconds = link.seconds(self.bytes)
                if self.kind is SEND:
                    self.completed = max(self.departs, self.met) + seconds
                else:
                    starts = max(
                        self.met, 0.0 if self.eager else self.posted, self.lane.incoming_free
                    )
                    self.lane.incoming_free = starts + seconds
                    self.completed = starts + seconds + link.latency
        return self.completed


@dataclass(eq=False)
class Poll:
    """A message that a lane waits for until it is told "not yet"."""

    operation: Operation

    def ready(self) -> bool:
        """Tell whether there is an answer."""
        return self.operation.done or self.operation.lane.released

    def waits_for(self) -> WaitsFor:
        """Say what for."""
        return self.operation.waits_for()
