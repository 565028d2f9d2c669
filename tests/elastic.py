"""For tests: jobs of simulated ranks that lose members at the events that we say.

Events are what a member does on its wires: it sends, receives, or answers a roll call. They are
counted over all of its views and streams.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from minidist.cli.train import train_as
from minidist.full.comm import Communicator
from minidist.full.comm.membership.simulated import SimulatedMember, run_members
from minidist.full.comm.wire import WireAround


class Killed(BaseException):
    """What ends a member, as a kill ends a process: nothing may catch it."""


class Events:
    """Counts a member's events, and kills it at one of them: at once, or after `delay` seconds, in
    which the others go as far as they can without it.
    """

    def __init__(self, at: int, delay: float = 0.0) -> None:
        self.at, self.delay, self.count = at, delay, 0

    def happen(self) -> None:
        self.count += 1
        if self.count >= self.at > 0:  # a stream may have been the first to hear
            time.sleep(self.delay)
            raise Killed(f"at event {self.at}")


class WatchedWire(WireAround):
    def __init__(self, inner: Any, events: Events) -> None:
        super().__init__(inner)
        self.events = events

    def isend(self, *message: Any) -> Any:
        self.events.happen()
        return super().isend(*message)

    def irecv(self, *message: Any) -> Any:
        self.events.happen()
        return super().irecv(*message)

    def all_gather_object(self, answer: Any) -> list[Any]:
        self.events.happen()
        return super().all_gather_object(answer)

    def derive(self, *group: Any, **options: Any) -> WatchedWire:
        return WatchedWire(super().derive(*group, **options), self.events)


class Watched:
    """A member whose events are counted."""

    def __init__(self, member: SimulatedMember, events: Events) -> None:
        self.member, self.events = member, events

    def enter(self, done: int = -1, place: int = 0) -> Communicator | None:
        comm = self.member.enter(done, place)
        return comm and Communicator(WatchedWire(comm.wire, self.events), comm.ledger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.member, name)


def train_job(
    words: Sequence[str], ranks: int, deaths: Mapping[int, Events] | None = None, **options: Any
) -> tuple[list[int | None], str]:
    """Run `train` as a job of simulated members; return their statuses and what was printed.

    `deaths` says whose events are counted.
    """
    printed, deaths = io.StringIO(), deaths or {}

    def program(member: SimulatedMember) -> int:
        events = deaths.get(member.number)
        return train_as(member if events is None else Watched(member, events), words)

    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        statuses = run_members(program, ranks, **options)
    return statuses, printed.getvalue()


def threads_left(before: set[threading.Thread]) -> list[str]:
    """Return the names of threads that a job has left behind."""
    for thread in set(threading.enumerate()) - before:
        thread.join(2.0)
    return [thread.name for thread in set(threading.enumerate()) - before]
