"""Who is left, and who takes which place: a pure function that every member can compute.

    last view           0 1 │ 2 3 │ 4 5        replicas of two ranks
    lost                  ✗         ✗          3 and 5 are here, their neighbours are not
    present             0     2 3     5   6    6 is new
    next view           0 6 │ 2 3              or with another new member 7:   0 5 │ 2 3 │ 4' ...

A view may follow only if more than half of the last view's members are in it, or exactly half with
the lowest among them (those that are known to be dead do not count): so of two halves that cannot
see each other at most one goes on. (Birman & Joseph 1987 call this a view; Gifford 1979, a quorum.)

Ranks of one replica hold different parts of the model. Who holds a part keeps its place in a replica,
so that it is of use: two broken replicas may make a whole one. A newcomer that was lost sight of
before it got its part has none to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class View(NamedTuple):
    """The members of a job at one time.

    Attributes
    ----------
    number : int
        1, 2, ...: the epoch. 0 is before the first.
    members : tuple of int
        The member at each rank. Neighbours are a replica.
    """

    number: int
    members: tuple[int, ...]


class Wanted(NamedTuple):
    """What a job wants to run on.

    Attributes
    ----------
    ranks : int
        Ranks of a whole view.
    least : int
        The fewest to go on with.
    together : int
        Ranks of a replica.
    """

    ranks: int
    least: int = 1
    together: int = 1


class Presence(NamedTuple):
    """A member that has come, and what it holds of the run.

    Attributes
    ----------
    member : int
    done : int
        How many steps have led to what it holds; -1: it holds nothing.
    place : int
        Which place of a replica that belongs to.
    """

    member: int
    done: int = -1
    place: int = 0


def has_quorum(last: View, present: Collection[int], dead: Collection[int]) -> bool:
    """Tell whether those present may decide for the members of the last view."""
    voters = [member for member in last.members if member not in dead]
    here = [member for member in voters if member in present]
    tied = 2 * len(here) == len(voters) and min(voters, default=0) in here
    return not voters or 2 * len(here) > len(voters) or tied


def next_view(
    last: View,
    present: Iterable[Presence],
    dead: Collection[int],
    wanted: Wanted,
) -> View | None:
    """Return the view that follows, or None if those present are too few.

    Of those that hold one place's part, who is furthest goes first. What is free is taken by those
    who are left, then by newcomers, the lowest first. Who finds no place waits outside.
    """
    here = [each for each in sorted(set(present)) if each.member not in dead]
    if not has_quorum(last, {each.member for each in here}, dead):
        return None
    size = wanted.together
    replicas = min(len(here), wanted.ranks) // size
    if replicas * size < max(wanted.least, 1):
        return None
    ranks = {member: rank for rank, member in enumerate(last.members)}

    def turn(each: Presence) -> tuple[int, int]:
        return -each.done, ranks.get(each.member, len(ranks))

    order = sorted(here, key=turn)
    kept: list[list[int]] = []  # of each place, who holds its part
    for place in range(size):
        holders = [each.member for each in order if each.done >= 0 and each.place == place]
        kept.append(holders[:replicas])
    placed = {member for holders in kept for member in holders}
    free = (each.member for each in order if each.member not in placed)
    members = []
    for replica in range(replicas):
        for holders in kept:
            members.append(holders[replica] if replica < len(holders) else next(free))
    return View(last.number + 1, tuple(members))


def grows(
    view: View,
    outside: Iterable[Presence],
    dead: Collection[int],
    wanted: Wanted,
) -> bool:
    """Tell whether those who wait outside would make the view larger. A member of it that has left
    because another one is lost waits there as well, and counts once.
    """
    present = {each for each in outside if each.member not in view.members}
    for rank, member in enumerate(view.members):
        place = rank % wanted.together
        present.add(Presence(member, 0, place))
    with_them = next_view(view, present, dead, wanted)
    return with_them is not None and len(with_them.members) > len(view.members)
