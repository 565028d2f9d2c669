"""Members that are threads: a job in which every failure can be placed at every event.

    run_members(program, ranks=4, spares=1)       program(member): enter a view, work, enter the next ...

A thread that raises is dead, as a process that ends would be; the others of its view hear of it at
their next message. Each view has a `World` of its own, so nothing of an old one can be mistaken for
the new one's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from minidist.full.comm.agree import debug_mode
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import RankFailed
from minidist.full.comm.job.background import WorkingThread
from minidist.full.comm.job.limit import time_limit
from minidist.full.comm.ledger import Ledger
from minidist.full.comm.membership.agreement import View, Wanted
from minidist.full.comm.membership.member import GRACE, PATIENCE, Member
from minidist.full.comm.membership.store import MemoryStore
from minidist.full.comm.threads_wire.first_calls import call_once
from minidist.full.comm.threads_wire.group import Group
from minidist.full.comm.threads_wire.threads_wire import ThreadsWire
from minidist.full.comm.threads_wire.world import World

Result = TypeVar("Result")


class SimulatedMember(Member):
    """A member that is a thread of this process.

    Attributes
    ----------
    comm : Communicator or None
        Between the members of its view.
    """

    comm: Communicator | None = None

    def __init__(self, house: House, number: int, **options: Any) -> None:
        super().__init__(house.store, number, **options)
        self.house = house

    def enter(self, done: int = -1, place: int = 0) -> Communicator | None:
        """Join a view, and return a communicator between its members; None: the job is done.

        Raises as `join`.
        """
        self.comm = None
        view = self.join(done, place)
        if view is None:
            return None
        world, lane = self.house.seat(view, self.number)
        wire = ThreadsWire(world, lane, Group(tuple(range(len(view.members)))))
        self.comm = Communicator(wire, Ledger(None, debug_mode(None)))
        return self.comm

    def lost(self, reason: str) -> None:
        """End the view because a rank is lost: every member stops waiting for the others."""
        if self.comm is not None:
            self.comm.fail(RankFailed(self.leave(reason)))

    def die(self, error: BaseException) -> None:
        """Be dead, as everybody can know."""
        self.store.append("dead", f"{self.number} ")
        self.lost(f"member {self.number} is dead: {type(error).__name__}: {error}")


class House:
    """What the threads of a job share."""

    def __init__(self, limit: float) -> None:
        self.store, self.limit = MemoryStore(), limit
        self.lock = threading.Lock()
        self.worlds: dict[int, tuple[World, list[Any]]] = {}
        self.threads: dict[int, threading.Thread] = {}

    def seat(self, view: View, member: int) -> tuple[World, Any]:
        """Return the world of a view, and the lane of one of its members."""
        with self.lock:
            if view.number not in self.worlds:
                self._end("this view is over")
                world = World(len(view.members), limit=self.limit)
                lanes = [world.add_lane(rank, "") for rank in range(len(view.members))]
                for lane, number in zip(lanes, view.members, strict=True):
                    lane.thread = self.threads[number]
                    world.carrier.goes_on(lane)  # or it will, once it comes here
                self.worlds[view.number] = world, lanes
            world, lanes = self.worlds[view.number]
        return world, lanes[view.members.index(member)]

    def end(self) -> None:
        """Let no thread wait any more, once the job is over."""
        with self.lock:
            self._end("this job is over")

    def _end(self, why: str) -> None:
        for world, _ in self.worlds.values():
            world.abort(-1, RankFailed(why))
        self.worlds.clear()


def run_members(
    program: Callable[[SimulatedMember], Result],
    ranks: int,
    *,
    spares: int = 0,
    least: int = 1,
    together: int = 1,
    limit: float | None = None,
    grace: float = GRACE,
    patience: float = PATIENCE,
) -> list[Result | None]:
    """Call `program(member)` on `ranks + spares` threads; return what each returned, None for the
    dead.

    Parameters
    ----------
    ranks, least, together
        See `Wanted`.
    spares : int
        Members more, which wait outside until a place is free.
    limit : float, optional
        Seconds that a rank may wait for another one; then the view is over, and a rank that hangs
        is left out.
    grace, patience : float
        See `Member`.

    Raises
    ------
    Exception
        What the last member to die raised, if all are dead.
    """
    house, count = House(time_limit(limit)), ranks + spares
    errors: list[BaseException] = []
    results: list[Result | None] = [None] * count

    def live(member: SimulatedMember) -> None:
        try:
            results[member.number] = program(member)
        except BaseException as error:
            errors.append(error)
            member.die(error)
        else:
            member.finish()

    options = {"wanted": Wanted(ranks, least, together), "started": count}
    members = [
        SimulatedMember(house, number, grace=grace, patience=patience, **options)
        for number in range(count)
    ]
    call_once()
    for member in members:
        house.threads[member.number] = WorkingThread(live, member, name=f"member {member.number}")
    try:
        for thread in house.threads.values():
            thread.start()
        for thread in house.threads.values():
            while thread.is_alive() and not house.store.read("done"):
                thread.join(0.2)  # in slices: an untimed join would not notice Ctrl-C everywhere
        # for the others of the last view, of which one may hang for ever
        deadline = time.monotonic() + grace
        for thread in house.threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:  # after Ctrl-C, too
        house.store.claim("done", "yes")
        house.end()
    if len(errors) == count:
        raise errors[-1]
    return results
