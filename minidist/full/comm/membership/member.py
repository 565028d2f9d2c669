"""One member of a job: how it comes into a view, and leaves it.

    join ──▶ "present 3": 0 4 1 ──▶ all are here, or have had their time ──▶ "view 3": 0 4 1 ──▶ rank
    leave ─▶ "over 3": why                          whoever sees it first writes it; the others follow

A view is written once, by whoever is first (`Store.claim`), so all members read the same one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from minidist.full.comm.errors import QuorumError
from minidist.full.comm.membership.agreement import (
    Presence,
    View,
    Wanted,
    grows,
    has_quorum,
    next_view,
)
from minidist.full.comm.membership.store import Store

GRACE = 5.0  # seconds that members of the last view have to come, unless they are known to be dead
PATIENCE = 60.0  # seconds after which a member that finds no view gives up


@dataclass(eq=False)
class Member:
    """A process, or a thread, that can be a rank.

    Parameters
    ----------
    store : Store
        The job's.
    number : int
        The member's, unlike all others of the job: a process that is started in place of a lost one
        has a new number.
    wanted : Wanted
        What the job wants to run on; the same for all members.
    started : int
        How many members were started at first: the first view waits for them.
    grace, patience : float
        Seconds.
    """

    store: Store
    number: int
    wanted: Wanted
    started: int
    grace: float = GRACE
    patience: float = PATIENCE

    view = View(0, ())

    def join(self, done: int = -1, place: int = 0) -> View | None:
        """Wait until this member belongs to a view, and return it; None: the job is done without.

        `done` and `place` say what it holds of the run; see `Presence`.

        Raises
        ------
        QuorumError
            If none comes that has it, for so many seconds as it has patience.
        """
        if self.number in self.view.members:
            self.leave(f"member {self.number} has left")
        began, announced, arrived = time.monotonic(), 0, 0.0
        while not self.store.read("done"):
            while self.has_view(self.view.number + 1):
                self.view = self._view(self.view.number + 1)
                if self.number in self.view.members and not self.is_over():
                    return self.view
            coming = self.view.number + 1
            if announced != coming:
                announced, arrived = coming, time.monotonic()
                self.store.append(f"present {coming}", f"{self.number},{done},{place} ")
            waited = time.monotonic() - arrived
            if waited > self.grace or self._awaited() <= self._members(coming):
                self._propose(coming)
            if ended := self.store.read("ended"):
                raise QuorumError(f"member {self.number}: the job has ended: {ended}")
            if time.monotonic() - began > self.patience and not self._inside():
                raise QuorumError(self._too_few(coming))
            self.store.wait()
        return None

    def finish(self, status: int = 0) -> None:
        """Say that the job is done, and with which exit status: who waits outside need not wait any
        more.
        """
        self.store.append("statuses", f"{status} ")
        self.store.claim("done", "yes")

    def leave(self, reason: str) -> str:
        """End the view for all its members; return the reason that was written first."""
        return self.store.claim(f"over {self.view.number}", reason)

    def check(self) -> None:
        """Raise RankFailed if a rank was lost, where nothing else says so: see `TorchMember`."""

    def is_over(self) -> bool:
        """Tell whether some member has ended this member's view, or is dead."""
        over = self.store.read(f"over {self.view.number}")
        return bool(over) or not self.dead().isdisjoint(self.view.members)

    def is_awaited(self) -> bool:
        """Tell whether somebody waits outside who would make the view larger."""
        outside = self.present(self.view.number + 1)
        return bool(outside) and grows(self.view, outside, self.dead(), self.wanted)

    def present(self, number: int) -> set[Presence]:
        """Return who has come to a view that is to be decided."""
        words = self.store.read(f"present {number}").split()
        return {Presence(*map(int, word.split(","))) for word in words}

    def dead(self) -> set[int]:
        """Return who is known to be dead: its launcher has seen it end."""
        return {int(word) for word in self.store.read("dead").split()}

    def has_view(self, number: int) -> bool:
        """Tell whether a view has been decided."""
        return bool(self.store.read(f"view {number}"))

    def _view(self, number: int) -> View:
        return View(number, tuple(map(int, self.store.read(f"view {number}").split())))

    def _members(self, number: int) -> set[int]:
        return {each.member for each in self.present(number)}

    def _awaited(self) -> set[int]:
        """Return who has to come before a view is decided without a grace."""
        awaited = self.view.members if self.view.number else range(self.started)
        return set(awaited) - self.dead()

    def _inside(self) -> bool:
        """Tell whether the newest view goes on, without this member: then it may wait for long."""
        return bool(self.view.number) and not self.is_over()

    def _propose(self, coming: int) -> None:
        if self._inside():
            return  # its members let us in between two steps
        view = next_view(self.view, self.present(coming), self.dead(), self.wanted)
        if view is not None:
            self.store.claim(f"view {coming}", " ".join(map(str, view.members)))

    def _too_few(self, coming: int) -> str:
        dead = self.dead()
        here = sorted(self._members(coming) - dead)
        why = "" if has_quorum(self.view, here, dead) else ", which is no majority of them"
        last = (
            f"of the last view {list(self.view.members)}" if self.view.number else "of nobody yet"
        )
        return (
            f"member {self.number}: after {self.patience:g} s only {here} are here {last}{why}; the "
            f"job needs {self.wanted.least} ranks, in replicas of {self.wanted.together}: start more "
            "members, or allow fewer with --min-ranks"
        )
