"""Who goes on when members are lost: views, quorum, places in a replica."""

from __future__ import annotations

import itertools
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

from minidist.full.collectives import all_reduce
from minidist.full.comm import membership
from minidist.full.comm.errors import QuorumError, RankFailed
from minidist.full.comm.membership.agreement import (
    Presence,
    View,
    Wanted,
    grows,
    has_quorum,
    next_view,
)
from minidist.full.comm.membership.member import Member
from minidist.full.comm.membership.simulated import SimulatedMember, run_members
from minidist.full.comm.membership.store import MemoryStore

FOUR = View(1, (0, 1, 2, 3))


def here(*members: tuple[int, int, int] | int) -> list[Presence]:
    """Return presences: a number is a member that holds step 5 of place 0."""
    return [
        Presence(member, 5) if isinstance(member, int) else Presence(*member) for member in members
    ]


@pytest.mark.parametrize(
    ("last", "present", "dead", "wanted", "expected"),
    [
        pytest.param(View(0, ()), here(2, 0, 1), set(), Wanted(3), (0, 1, 2), id="the first view"),
        pytest.param(FOUR, here(0, 1, 3), {2}, Wanted(4), (0, 1, 3), id="one is lost"),
        pytest.param(FOUR, here(0, 1, 3, (9, -1, 0)), {2}, Wanted(4), (0, 1, 3, 9), id="a spare"),
        pytest.param(FOUR, here(2, 3), set(), Wanted(4), None, id="half, without the lowest"),
        pytest.param(FOUR, here(0, 1), set(), Wanted(4), (0, 1), id="half, with the lowest"),
        pytest.param(FOUR, here(3), {0, 1, 2}, Wanted(4), (3,), id="the dead do not vote"),
        pytest.param(FOUR, here(0, 1), {2, 3}, Wanted(4, least=3), None, id="too few"),
        pytest.param(
            FOUR, here((1, 5, 1), (2, 5, 0)), {0, 3}, Wanted(4, 1, 2), (2, 1), id="two halves"
        ),
        pytest.param(
            FOUR,
            here((1, 5, 1), (2, 5, 0), (3, 5, 1)),
            {0},
            Wanted(4, 1, 2),
            (2, 1),
            id="one waits",
        ),
        pytest.param(
            FOUR,
            here((1, 5, 1), (2, 5, 0), (3, 5, 1), (8, -1, 0)),
            {0},
            Wanted(4, 1, 2),
            (2, 1, 8, 3),
            id="the place that is free",
        ),
        pytest.param(
            View(2, (7, 0)), here((7, -1, 0), 0), set(), Wanted(1), (0,), id="who holds goes first"
        ),
        pytest.param(FOUR, here(0, (1, 6, 0), 2), {3}, Wanted(2), (1, 0), id="who is furthest"),
    ],
)
def test_the_view_that_follows(
    last: View,
    present: list[Presence],
    dead: set[int],
    wanted: Wanted,
    expected: tuple[int, ...] | None,
) -> None:
    view = next_view(last, present, dead, wanted)
    assert view == (None if expected is None else View(last.number + 1, expected))


def test_of_two_parts_that_cannot_see_each_other_at_most_one_goes_on() -> None:
    for size in range(1, 6):
        last = View(1, tuple(range(10, 10 + size)))
        for dead in map(
            set,
            itertools.chain.from_iterable(
                itertools.combinations(last.members, count) for count in range(size)
            ),
        ):
            alive = [member for member in last.members if member not in dead]
            for cut in range(2 ** len(alive)):
                part = {member for place, member in enumerate(alive) if cut >> place & 1}
                rest = set(alive) - part
                assert has_quorum(last, part, dead) + has_quorum(last, rest, dead) == 1


def test_a_view_grows_only_by_whole_replicas() -> None:
    view, wanted = View(3, (0, 1)), Wanted(4, 1, 2)
    assert not grows(view, [Presence(5)], set(), wanted)
    assert grows(view, [Presence(5), Presence(6)], set(), wanted)
    assert not grows(view, [Presence(5), Presence(6)], {6}, wanted)
    assert not grows(View(3, (0, 1, 2, 3)), [Presence(5), Presence(6)], set(), wanted)
    # the first to hear that 2 is lost, before the lowest has looked
    assert not grows(View(3, (0, 1, 2, 3)), here((3, 5, 1), (1, 5, 1)), {2}, wanted)


def test_a_half_that_does_not_see_the_store_ends() -> None:
    store = MemoryStore()
    options = {"wanted": Wanted(4), "started": 4}
    members = [Member(store, number, **options) for number in range(4)]  # type: ignore[arg-type]
    views = _together(lambda member: member.join(), members)
    assert {view.members for view in views} == {(0, 1, 2, 3)}
    for member in members:
        member.grace = 0.05
    for member in members[2:]:
        member.patience = 0.3
        member.store = MemoryStore()  # what they write, nobody reads
    members[0].leave("a cut"), members[2].leave("a cut")
    joined = _together(lambda member: member.join(3), members)
    assert joined[:2] == [View(2, (0, 1))] * 2
    assert [type(each) for each in joined[2:]] == [QuorumError] * 2
    assert "no majority" in str(joined[2])


def _together(work: object, members: list[Member]) -> list[object]:
    found: list[object] = [None] * len(members)

    def do(place: int) -> None:
        try:
            found[place] = work(members[place])  # type: ignore[operator]
        except QuorumError as error:
            found[place] = error

    places = range(len(members))
    threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_a_view_is_over_once_a_member_is_dead() -> None:
    """Else those who come in place of members that all died at once would wait for them."""
    store = MemoryStore()
    options = {"wanted": Wanted(2, 2), "started": 2, "grace": 0.05, "patience": 30.0}
    first = [Member(store, number, **options) for number in range(2)]  # type: ignore[arg-type]
    _together(lambda member: member.join(), first)
    store.append("dead", "0 1 ")
    assert first[0].is_over()
    second = [Member(store, number, **options) for number in (2, 3)]  # type: ignore[arg-type]
    assert _together(lambda member: member.join(), second) == [View(2, (2, 3))] * 2


def test_a_rank_that_hangs_is_left_out() -> None:
    asleep, left_out = threading.Event(), threading.Event()

    def program(member: SimulatedMember) -> tuple[int, ...] | None:
        while (comm := member.enter()) is not None:
            try:
                if member.number == 1 and not asleep.is_set():
                    asleep.set()
                    left_out.wait(60)
                all_reduce(np.ones(4), comm)
                left_out.set()
                return member.view.members
            except RankFailed as error:
                member.lost(str(error))
            except Exception as error:  # a limit
                member.lost(str(error))
        return None

    results = run_members(program, 3, limit=1.0, grace=1.0)
    assert results[0] == results[2] == (0, 2)
    assert results[1] is None, "it comes back when the job is done"


def test_the_program_in_the_docstring_survives() -> None:
    told = textwrap.dedent((membership.__doc__ or "").partition("the same:\n")[2])
    source = told.partition("run_members(")[0]
    names: dict[str, Any] = {"np": np, "all_reduce": all_reduce, "RankFailed": RankFailed}
    exec(source, names)

    class Watched:
        """Dies at its fifth message, once the spare waits."""

        def __init__(self, member: SimulatedMember) -> None:
            self.member, self.left = member, 5

        def enter(self, done: int) -> object:
            comm = self.member.enter(done)
            if comm is not None and self.member.number == 1:
                comm.trace = self  # type: ignore[assignment]
            return comm

        def record(self, event: object) -> None:
            self.left -= 1
            if not self.left:
                while not self.member.present(2):
                    self.member.store.wait()
                raise MemoryError("dead")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.member, name)

    results = run_members(lambda member: names["program"](Watched(member)), 3, spares=1)
    assert results[1] is None
    assert all((result == 100).all() for result in (results[0], results[2], results[3]))
