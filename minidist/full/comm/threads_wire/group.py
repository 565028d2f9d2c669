"""What the ranks of one group share, made once for all of them: who they are, and their roll calls.

A rank that made these tables for itself would take a time that grows with the ranks, and all of
them together one that grows with the square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minidist.full.comm.threads_wire.lanes import Lane, WaitsFor

ABSENT = object()


class Group:
    """The ranks of a group, and what they bring to fences that some have still to come to.

    Attributes
    ----------
    members : tuple[int, ...]
        Their numbers in the world.
    places : dict[int, int]
        Each one's number in the group.
    absent : int
        How many have not asked for it yet.
    nodes : list or None
        For each rank, which ranks share memory with it, once somebody has asked.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.absent = len(members)
        self.places = {member: rank for rank, member in enumerate(members)}
        self.nodes: list[tuple[int, ...]] | None = None
        # by number: the rank that came first, its bytes, and how many have come
        self.fences: dict[int, tuple[int, int, int]] = {}

    def come_to_fence(self, number: int, rank: int, bytes: int) -> tuple[int, int]:
        """Note that a rank comes to a fence; return who came first, and its bytes."""
        first, its, before = self.fences.pop(
            number,
            (rank, bytes, 0),
        )
        come = before + 1
        if come < len(self.members):
            self.fences[number] = first, its, come
        return first, its


class RollCall:
    """Answers of all ranks of a group, one of its collective calls."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.answers: list[Any] = [ABSENT] * len(group.members)
        self.missing = len(group.members)
        self.lanes: list[Lane] = []  # of the ranks that have come
        self.concluded: Any = ABSENT

    def bring(self, lane: Lane, answer: Any) -> bool:
        """Note an answer; tell whether it was the last one."""
        self.answers[self.group.places[lane.rank]] = answer
        self.lanes.append(lane)
        self.missing -= 1
        return self.ready()

    def ready(self) -> bool:
        """Tell whether all ranks have come."""
        return not self.missing

    def waits_for(self) -> WaitsFor:
        """What a rank waits for that has come, and the first one that has not."""
        absent = (rank for rank, answer in enumerate(self.answers) if answer is ABSENT)
        rank = next(absent, None)
        member = None if rank is None else self.group.members[rank]
        return "all ranks to come to all_gather_object", member

    def conclude(self, decide: Callable[[list[Any]], Any]) -> Any:
        """Return what `decide` makes of the answers; the first rank to ask decides for all."""
        if self.concluded is ABSENT:
            self.concluded = decide(self.answers)
        return self.concluded
