"""Lesson 21, tasks 1 and 2: the judges of who is left, and of what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect,
    expect_orderly,
    expect_ranks,
    known,
    sent_by,
)

# ---------------------------------------------------------------- task 1

Members = tuple[int, ...]
Followed = tuple[int, Members] | None


def follows(
    number: int, members: Members, here: Members, dead: Members, ranks: int, how: str = ""
) -> Followed:
    """Return the number and the members of the view that follows; `how` is one of `SLIPS`."""
    voters = [each for each in members if each not in dead or how == "all vote"]
    alive = [each for each in here if each not in dead or how == "dead are here"]
    votes = [each for each in voters if each in alive]
    if how == "dead vote":
        voters = list(members)
        votes = [each for each in members if each in here]
    if how in ("newcomers vote", "newcomers are voters"):
        newcomers = [each for each in alive if each not in members]
        votes += newcomers
        voters += newcomers if how == "newcomers are voters" else []
    of_ranks = how in ("of ranks", "more than half of ranks") and members
    count = ranks if of_ranks else len(voters)
    lowest = {
        "lowest of all": min(members, default=0),
        "lowest with newcomers": min([*voters, *alive], default=0),
        "lowest rank": next(iter(voters), 0),
    }.get(how, min(voters, default=0))
    tied = 2 * len(votes) == count and lowest in votes
    if how in ("half", "never half", "more than half of ranks"):
        tied = how == "half" and 2 * len(votes) == count
    alone = not voters and how != "no voters"
    if not (alone or 2 * len(votes) > count or tied or how == "no quorum"):
        return (number, members) if how == "the last one" else None
    left = [each for each in members if each in alive]
    new = [each for each in alive if each not in members]
    left = sorted(left) if how == "sorted" else left
    new = new if how == "arrival" else sorted(new)
    whole = {
        "newcomers first": new + left,
        "sorted together": sorted(left + new),
        "no newcomers": left,
        "of here": alive,
        "holes": filled(members, left, new),
    }.get(how, left + new)
    whole = whole if how == "no limit" else whole[:ranks]
    if how == "full views alone" and len(whole) < ranks:
        return None
    if not whole and how != "empty view":
        return None
    return number + (how != "same number"), tuple(whole)


def filled(members: Members, left: Sequence[int], new: Sequence[int]) -> list[int]:
    """Return the view in which newcomers take the places of those who are lost."""
    waiting = list(new)
    places = [
        each if each in left else waiting.pop(0) for each in members if each in left or waiting
    ]
    return places + waiting


SLIPS = {
    "no voters": "there is no view if there are no voters: then whoever is here may begin",
    "newcomers vote": "newcomers have a vote",
    "newcomers are voters": "newcomers are voters",
    "dead vote": "the dead are voters, and vote if they are named in `here`",
    "dead are here": "the dead are taken into the view, since they are named in `here`",
    "all vote": "the dead are voters: a majority is then a majority of them, too",
    "lowest rank": "half is enough with the voter of the lowest rank, not of the lowest number",
    "lowest of all": "half is enough with the lowest member of the last view, who may be dead, not "
    "with the lowest voter",
    "lowest with newcomers": "half is enough with the lowest of all who are here, newcomers too, not with "
    "the lowest voter",
    "half": "half of the voters is enough, whoever they are: of two halves both go on",
    "never half": "half of the voters is never enough, also with the lowest of them",
    "of ranks": "a majority is one of `ranks`, not of the voters",
    "more than half of ranks": "a majority is more than half of `ranks`, not of the voters",
    "no quorum": "nobody asks whether those who are here may decide",
    "the last one": "the last view is returned, not None, where nothing may be decided",
    "full views alone": "a view of fewer than `ranks` members is refused",
    "sorted": "members of the last view are sorted by number, not by their ranks there",
    "sorted together": "all are sorted by number: newcomers come behind members of the last view",
    "newcomers first": "newcomers come before members of the last view",
    "no newcomers": "newcomers are left out, though there is room",
    "of here": "members come in the order of `here`",
    "arrival": "newcomers come in the order of `here`, not by number",
    "holes": "newcomers take the ranks of those who are lost, in front of some who are left",
    "no limit": "the view has more than `ranks` members",
    "same number": "the number of the view is not one more",
    "empty view": "there is a view without members",
}


def judge_view(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare one view with the rules, and with known misreadings of them."""
    given, result = case.given[0], results[0]
    asked = (
        int(given["number"]),
        *(tuple(given[name].tolist()) for name in ("members", "here", "dead")),
        int(given["ranks"]),
    )
    found = None
    if not result["refused"]:
        found = int(result["number"]), tuple(result["members"].tolist())
    expected = follows(*asked)
    number, members, here, dead, ranks = asked
    says = (
        f"last view {number} of {listed(members)}, here {listed(here)}, dead {listed(dead)}, "
        f"ranks={ranks}: {viewed(found)}, expected {viewed(expected)}"
    )
    wrongly = {clause: [follows(*asked, how)] for how, clause in SLIPS.items()}
    expect(found == expected, says, wrongly, [found].__eq__)


def listed(members: Members) -> str:
    """Return members in words."""
    return " ".join(map(str, members)) or "nobody"


def viewed(view: Followed) -> str:
    """Return a view in words."""
    return "None" if view is None else f"view {view[0]} of {listed(view[1])}"


# ---------------------------------------------------------------- task 2

NAMES = ("weight", "mean", "count")


def state(given: Arrays, steps: int) -> dict[str, Array]:
    """Return the arrays that so many steps lead to: of a newcomer, what lies there."""
    if steps < 0:
        return {name: given[f"{name} of nobody"] for name in NAMES}
    return {name: given[name] + steps * given[f"{name} of a step"] for name in NAMES}


def standings(case: Case) -> list[tuple[int, bool]]:
    """Return what each rank holds: (done, ready)."""
    return [(int(given["done"]), bool(given["ready"])) for given in case.given]


Transfers = list[tuple[int, int]]


def plan(held: Sequence[tuple[int, bool]], how: str = "") -> tuple[list[int], Transfers, list[int]]:
    """Return the steps that each rank's arrays have in the end, who sends to whom, and how often
    each rank takes a step; `how` is one of `WAYS`.
    """
    dones = [done for done, _ in held]
    newest = max(dones)
    if how == "the oldest":
        newest = min((done for done in dones if done >= 0), default=-1)
    if how == "ready ones" and newest >= 0:
        newest = max(done + ready for done, ready in held)
    took = [int(done + 1 == newest and ready) for done, ready in held]
    took = {
        "nobody steps": [0] * len(held),
        "all ready ones": [int(ready) for _, ready in held],
        "any behind": [int(-1 < done < newest) for done in dones],
        "ready and behind": [int(ready and done < newest) for done, ready in held],
        "not ready": [int(done + 1 == newest >= 1) for done in dones],
    }.get(how, took)
    steps = [done + took[rank] for rank, done in enumerate(dones)]
    has = [rank for rank, each in enumerate(steps) if each == newest]
    if how == "all ready ones":
        has = [rank for rank, (done, ready) in enumerate(held) if newest in (done, done + ready)]
    if how == "done ones serve":
        has = [rank for rank, done in enumerate(dones) if done == newest]
    if how == "furthest first":
        has.sort(key=lambda rank: -dones[rank])
    needy = [rank for rank in range(len(held)) if rank not in has]
    if how == "done ones serve":
        needy = [rank for rank in needy if steps[rank] != newest]
    if how == "newcomers only":
        needy = [rank for rank in needy if dones[rank] < 0]
    if how == "ready ones fetch":
        took = [0] * len(held)
        steps, has = list(dones), [rank for rank, done in enumerate(dones) if done == newest]
        needy = [rank for rank in range(len(held)) if rank not in has]
    if newest < 0 and how == "new ones, too":
        return steps, [(0, rank) for rank in range(1, len(held))], took
    if newest < 0 or how == "never fetches" or not has:
        return steps, [], took
    sources = [has[number % len(has)] for number in range(len(needy))]
    sources = {
        "rank 0 serves": [0] * len(needy),
        "the first serves": [has[0]] * len(needy),
        "the last serves": [has[-1]] * len(needy),
        "by rank": [has[rank % len(has)] for rank in needy],
        "blocks": [has[number * len(has) // len(needy)] for number in range(len(needy))],
    }.get(how, sources)
    transfers = list(zip(sources, needy, strict=True))
    if how == "to all":
        transfers = [(has[0], rank) for rank in range(len(held)) if rank != has[0]]
    for source, rank in transfers:
        steps[rank] = steps[source]
    return steps, transfers, took


WAYS = {
    "all ready ones": "every rank that is ready takes the step, also if nobody has taken it",
    "ready ones": "it goes on after the step for which some are ready, though nobody has taken it",
    "nobody steps": "no rank takes the step for which it is ready",
    "ready ones fetch": "a rank that could take the step itself gets its arrays from a peer",
    "any behind": "every rank that is behind and not new takes a step, ready or not",
    "not ready": "a rank that is one step behind takes the step though it is not ready",
    "ready and behind": "a rank that is ready takes the step however far it is behind",
    "the oldest": "it goes back to the rank that is furthest behind",
    "never fetches": "no rank gets anything from a peer, or gets it into a copy of its arrays",
    "newcomers only": "only newcomers get the arrays, not a rank that is behind and not ready",
    "rank 0 serves": "rank 0 is taken for a rank that has what is needed",
    "the first serves": "the first rank that has the arrays sends to all",
    "the last serves": "the last rank that has the arrays sends to all",
    "to all": "one rank sends to every other one, needy or not",
    "done ones serve": "ranks that got there by take_step serve nobody",
    "furthest first": "those who had taken the step are numbered before those who took it just now",
    "new ones, too": "rank 0 sends its arrays to all if all are new: they hold nothing",
    "by rank": "the peer is chosen by the needy rank's rank, not by its number among the needy",
    "blocks": "neighbouring needy ranks have the same peer: they take turns",
}


def judge_recovered(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The furthest rank's arrays everywhere, steps where they are due, and messages as planned."""
    held = standings(case)
    newest = max(done for done, _ in held)
    expected, transfers, took = plan(held)
    called = [int(result["calls"]) for result in results]
    told = f"standings (done, ready) {', '.join(f'({done}, {ready})' for done, ready in held)}"
    for rank, (count, due) in enumerate(zip(called, took, strict=True)):
        if count != due:
            ways = {clause: plan(held, how)[2] for how, clause in WAYS.items()}
            raise Wrong(
                f"{told}: rank {rank} calls take_step {times(count)}, expected {times(due)}"
                + (known(ways, lambda way: way == called) if max(called) < 2 else "")
            )
    for _, rank in transfers:
        given, result = case.given[rank], results[rank]
        old = state(given, held[rank][0])
        left = [name for name in NAMES if np.array_equal(result[name], old[name])]
        if left and len(left) < len(NAMES):
            came = ", ".join(name for name in NAMES if name not in left)
            raise Wrong(
                f"{told}: rank {rank} has got {came}, and not {', '.join(left)}: it needs all arrays"
            )
    for name in NAMES:
        wrongly: dict[str, Any] = {
            clause: [state(case.given[0], steps)[name] for steps in plan(held, how)[0]]
            for how, clause in WAYS.items()
        }
        found = [result[name] for result in results]
        right = [
            result[name] if newest < 0 else state(case.given[0], steps)[name]
            for result, steps in zip(results, expected, strict=True)
        ]
        expect_ranks(
            f"{told}: {name}",
            found,
            right,
            # Right arrays refute nothing that is told of calls: fewer ranks may take a step.
            instead={} if all(map(np.array_equal, found, right)) else wrongly,
            before=[state(case.given[0], done)[name] for done, _ in held],
        )
    judge_messages(case, notes, held, transfers, told)
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        if int(result["step"]) != newest:
            ways = {
                "the step for which ranks are ready is returned, not the one that was taken": newest
                + 1,
                "the rank's own step before it is returned": held[rank][0],
                "the smallest step of all is returned": min(done for done, _ in held),
                "the smallest step that is not -1 is returned": min(
                    (done for done, _ in held if done >= 0), default=-1
                ),
            }
            raise Wrong(
                f"{told}: rank {rank} returns {int(result['step'])}, expected {newest}"
                + known(ways, lambda way, result=result: way == int(result["step"]))
            )


def judge_messages(
    case: Case,
    notes: Sequence[Note],
    held: Sequence[tuple[int, bool]],
    transfers: Transfers,
    told: str,
) -> None:
    """One message for each array of each needy rank, from the peer whose turn it is."""
    sizes = sorted(state(case.given[0], 0)[name].nbytes for name in NAMES)
    sent = [note for rank in range(case.ranks) for note in sent_by(rank, notes)]
    pairs = {(note.rank, note.to) for note in sent}
    if pairs != set(transfers):
        ways = {clause: set(plan(held, how)[1]) for how, clause in WAYS.items()}
        arrows = [", ".join(f"{a} to {b}" for a, b in sorted(each)) for each in (pairs, transfers)]
        raise Wrong(
            f"{told}: messages go from {arrows[0] or 'nobody'}, expected {arrows[1] or 'nobody'}"
            + known(ways, lambda way: way == pairs)
        )
    for source, rank in transfers:
        found = sorted(note.bytes for note in sent if (note.rank, note.to) == (source, rank))
        if found != sizes:
            more = sum(found) - sum(sizes)
            why = f": {more} bytes more than the arrays have" if more > 0 else ""
            if len(found) == 1:
                why += ": all arrays are packed into one, and each is to be a message of its own"
            elif len(found) > len(sizes):
                why += ": there are more messages than arrays"
            raise Wrong(
                f"{told}: rank {source} sends messages of {found} bytes to rank {rank}, expected "
                f"{sizes}{why}"
            )


def times(count: int) -> str:
    """Return how often, in words."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def own(exercise: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Return an object of the student's own class."""
    return getattr(exercise, name)(**values)
