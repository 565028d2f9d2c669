"""Lesson 16, task 5: the scenes that a watchdog looks at, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from judges import letters

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Draw, Note, Wrong, expect_equal

DOING, DOING_LETTERS = ("computes", "waits", "finished"), "CWF"
Finding = tuple[str, list[int]] | None
# What it is: the limit; the looks: the time, and of each rank whether it Computes, has Finished, or
# waits for whom and since when; the finding; and after how many looks.
SCENES: dict[str, tuple[float, tuple[str, ...], Finding, int]] = {
    "three wait in a cycle": (
        100,
        ("1: C 2@0.5 3@0.5 C", "2: 2@1.5 2@0.5 3@0.5 1@1.5", "3: 2@1.5 2@0.5 3@0.5 1@1.5"),
        ("deadlock", [1, 2, 3]),
        3,
    ),
    "rank 2 has finished": (
        100,
        ("1: 1@0.5 2@0.5 F C", "2: 1@0.5 2@0.5 F C"),
        ("gone", [0, 1, 2]),
        2,
    ),
    "rank 2 computes for long": (
        10,
        (
            "1: 1@0.25 2@0.5 C",
            "5: 1@0.25 2@0.5 C",
            "10.25: 1@0.25 2@0.5 C",
            "10.75: 1@0.25 2@0.5 C",
        ),
        ("slow", [0, 1, 2]),
        4,
    ),
    "a message was on its way": (
        10,
        ("1: 1@0.5 0@0.5", "2: 1@1.5 0@1.5", "3: C 0@2.5", "4: F C", "5: F F"),
        None,
        5,
    ),
    "rank 0 has waited for long": (
        10,
        ("9: 1@0.25 2@8.5 C", "10: 1@0.25 2@9.5 C", "10.75: 1@0.25 2@10.5 C", "11: F F F"),
        ("slow", [0, 1, 2]),
        3,
    ),
    "who leads to the cycle moves": (
        100,
        ("1: 2@0.5 4@0.5 3@0.5 2@0.5 F", "2: 2@1.5 4@0.5 3@0.5 2@0.5 F"),
        ("deadlock", [2, 3]),
        2,
    ),
    "a clock of whole seconds": (
        10,
        ("1: 1@1 0@1", "1.5: 1@1 C", "1.75: 1@1 0@1", "3: F F"),
        None,
        4,
    ),
    "a cycle downwards": (
        100,
        ("1: C 3@0.5 1@0.5 2@0.5", "2: C 3@0.5 1@0.5 2@0.5"),
        ("deadlock", [1, 3, 2]),
        2,
    ),
    "the second chain counts": (
        100,
        ("1: 1@0.5 C 3@0.5 F", "2: 1@1.5 C 3@0.5 F"),
        ("gone", [2, 3]),
        2,
    ),
    "nobody looked for long": (10, ("1: C C", "20: 1@2 C"), ("slow", [0, 1]), 2),
    "all is well": (10, ("1: C 0@0.5 C", "2: 2@1.5 C C", "3: F F F"), None, 3),
}


class NothingLeft(Exception):
    """A scene is over, but is looked at again."""


def look_on(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5, counting looks and pauses."""
    counted = {"looks": 0, "pauses": 0}

    def look() -> tuple[float, list[tuple[str, int, float]]]:
        number = counted["looks"]
        if number == len(given["now"]):
            raise NothingLeft
        counted["looks"] += 1
        columns = (given[name][number].tolist() for name in ("doing", "peer", "since"))
        states = [(DOING[doing], peer, since) for doing, peer, since in zip(*columns, strict=True)]
        return float(given["now"][number]), states

    def pause() -> None:
        counted["pauses"] += 1

    try:
        answer = exercise.watch(look, pause, float(given["limit"]))
    except NothingLeft:
        answer = "on and on", []
    kind, ranks = ("nothing", []) if answer is None else answer
    return {**counted, "kind": letters(str(kind)), "ranks": np.array(ranks, np.int64)}


def judge_scene(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The finding that the scene was written for, at the right look."""
    _, _, finding, looks = SCENES[case.label]
    expect_finding(case.given[0], results[0], finding, looks)


def expect_finding(given: Arrays, result: Arrays, finding: Finding, looks: int) -> None:
    """Raise `Wrong` unless this was found, after so many looks, with a pause between each two."""
    kind, ranks, when = (
        result["kind"].tobytes().decode(),
        result["ranks"].tolist(),
        int(result["looks"]),
    )
    found = None if kind == "nothing" else (kind, ranks)
    if found != finding or when != looks:
        says = "watch went on after" if kind == "on and on" else f"watch found {found} at"
        expected = "that" if found == finding else finding
        why = unfounded(given, kind, ranks, when) or overlooked(
            given, finding, kind, ranks, looks, when
        )
        raise Wrong(f"{says} look {when}, expected {expected} at look {looks}{why}")
    instead = {
        "it pauses before the first look, too, or after the last": np.array(looks),
        "it never pauses": np.array(0),
        "it pauses twice between looks": np.array(2 * looks - 2),
        "it pauses before and after each look": np.array(2 * looks),
        "it pauses before the first look, and between looks twice": np.array(2 * looks - 1),
        "it pauses for each rank that waits": np.array((given["doing"][: looks - 1] == 1).sum()),
    }
    expect_equal(0, "the number of pauses", result["pauses"], np.array(looks - 1), instead=instead)


def unfounded(given: Arrays, kind: str, ranks: Sequence[int], when: int) -> str:
    """Return why what was found at look number `when` does not count, in words behind the
    rejection, or nothing.
    """
    doing, since = given["doing"], given["since"]
    waits = [rank for rank in ranks if doing[when - 1][rank] == 1]
    if kind == "nothing" and (doing[when - 1] == 0).any():
        return ": some ranks still compute, and may wait later: it is over when all have finished"
    if kind == "slow" and not given["now"][when - 1] - since[when - 1][ranks[0]] > given["limit"]:
        return f": rank {ranks[0]}, where the chain begins, has not waited for more than the limit"
    if kind not in ("deadlock", "gone"):
        return ""
    if when == 1:
        return ": one look proves nothing, a message may be on its way"
    moved = [
        rank
        for rank in waits
        for name in ("doing", "peer")
        if given[name][when - 1][rank] != given[name][when - 2][rank]
    ]
    if moved:
        return f": rank {moved[0]} did something else at the look before"
    again = [rank for rank in waits if since[when - 1][rank] != since[when - 2][rank]]
    return (
        f": at the look before, rank {again[0]} was in another wait, which has ended"
        if again
        else ""
    )


def overlooked(
    given: Arrays, finding: Finding, kind: str, ranks: Sequence[int], looks: int, when: int
) -> str:
    """Return why `finding` is one, or in which form, if something else was found, or nothing, or
    the same too late.
    """
    if finding is None:
        return ""
    late, first = (
        looks < when or kind == "on and on",
        int((given["doing"][looks - 1] == 1).argmax()),
    )
    if late and finding[0] != "deadlock" and finding[1][0] != first:
        return (
            ": each rank that waits begins a chain; if the first chain does not count, the next "
            "one may"
        )
    if kind == finding[0] == "deadlock" and {*ranks} > {*finding[1]}:
        return ": ranks that lead to the cycle are not in it"
    if kind == finding[0] == "deadlock" and {*ranks} == {*finding[1]} and not late:
        if ranks and ranks[0] == min(ranks):
            return ": the ranks of a cycle are in the order in which they wait, not sorted"
        return ": the cycle begins with its lowest rank"
    if kind == finding[0] and not late and [*ranks] != finding[1]:
        return {
            "deadlock": ": the whole cycle is returned",
            "gone": ": the whole chain is returned, the finished rank last, and lower ranks' chains come "
            "first",
            "slow": ": the whole chain is returned, the computing rank last, and lower ranks' chains come "
            "first",
        }[finding[0]]
    if kind == "nothing" and not late:
        return ": it is over when all ranks have finished, and not before"
    if (
        late
        and finding[0] == "slow"
        and looks > 1
        and given["since"][looks - 2][first] != given["since"][looks - 1][first]
    ):
        return (
            ": a chain is slow as soon as its first rank has waited for too long, whatever was at "
            "the look before"
        )
    return {
        "deadlock": ": the ranks in the cycle wait as at the look before; those that lead to it need not",
        "gone": ": the ranks in the chain that wait do so as at the look before; the finished one "
        "need not",
        "slow": ": the rank where the chain begins has waited for more than the limit, whoever it "
        "waits for",
    }[finding[0]]


def scene_case(label: str, limit: float, looks: Sequence[str]) -> Case:
    """Return a scene as numbers."""
    states = [[state.partition("@") for state in look.split()[1:]] for look in looks]
    given = {
        "limit": np.array(limit),
        "now": np.array([float(look.partition(":")[0]) for look in looks]),
        "doing": np.array(
            [[1 if at else DOING_LETTERS.index(who) for who, at, _ in row] for row in states]
        ),
        "peer": np.array([[int(who) if at else -1 for who, at, _ in row] for row in states]),
        "since": np.array([[float(since or 0) for _, _, since in row] for row in states]),
    }
    return Case((given,), label)


def scenes(*labels: str) -> Draw:
    """One case for each of these scenes."""
    return lambda rng: [scene_case(label, *SCENES[label][:2]) for label in labels]
