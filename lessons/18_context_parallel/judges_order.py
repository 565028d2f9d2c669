"""Lesson 18, task 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong

ORDERS = ("contiguous", "zigzag", "striped")


def run_positions(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Return the positions of all ranks, in each order, and whether a length is refused that does
    not come out even.
    """
    ranks, time = (int(given[name]) for name in ("ranks", "time"))
    found: dict[str, Any] = {}
    for order in ORDERS:
        for rank in range(ranks):
            mine = exercise.positions(order, ranks, rank, time)
            found[f"{order} {rank}"] = np.asarray(mine)
        # in zigzag order ranks alone do not suffice
        odd = time + (ranks if order == "zigzag" else 1)
        found[f"{order} refused"] = ranks == 1
        with suppress(ValueError):
            exercise.positions(order, ranks, 0, odd)
            continue
        found[f"{order} refused"] = True
    return found


def expected_positions(order: str, ranks: int, rank: int, time: int) -> Array:
    """Return them from a list of whose each token is."""
    chunk = np.arange(time) * 2 * ranks // time  # of 2 P
    whose = {
        "contiguous": np.arange(time) * ranks // time,
        "striped": np.arange(time) % ranks,
        "zigzag": np.minimum(chunk, 2 * ranks - 1 - chunk),
    }
    return np.flatnonzero(whose[order] == rank)


def judge_positions(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every token is on the rank on which it should be."""
    ranks, time = (int(case.given[0][name]) for name in ("ranks", "time"))
    for order in ORDERS:
        everyones = [expected_positions(order, ranks, rank, time) for rank in range(ranks)]
        for rank in range(ranks):
            found = results[0][f"{order} {rank}"]
            own, chunks = time // ranks, np.arange(time).reshape(2 * ranks, -1)
            dealt, turned = (chunks[rank], chunks[rank + ranks]), (chunks[-1 - rank], chunks[rank])
            instead = {
                "a rank has two neighbouring chunks": np.concatenate(
                    [chunks[2 * rank], chunks[2 * rank + 1]]
                ),
                "a rank has chunks r and r + P, as cards are dealt": np.concatenate(dealt),
                "the chunk from the end comes first: they are to ascend": np.concatenate(turned),
                "the chunk from the end is counted from P instead of from 2 P": np.concatenate(
                    [chunks[rank], chunks[ranks - 1 - rank]]
                ),
            }
            for side, which in (
                ("first", (chunks[rank][::-1], chunks[-1 - rank])),
                ("second", (chunks[rank], chunks[-1 - rank][::-1])),
            ):
                instead[f"the {side} chunk is in descending order"] = np.concatenate(which)
            others = {
                f"they are those of {other} order": expected_positions(other, ranks, rank, time)
                for other in ORDERS
            }
            instead = instead | others if order == "zigzag" else others
            instead[
                "they count from the rank's own first token: positions are those in the whole "
                "sequence"
            ] = np.arange(own)
            if found.dtype != np.int64:
                raise Wrong(f"positions({order!r}, ...) are {found.dtype}, expected int64")
            contract.expect_equal(
                rank,
                f"positions in {order} order",
                found,
                everyones[rank],
                instead=instead,
                others=everyones,
            )


def judge_lengths(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """A ValueError, in each order."""
    ranks, time = (int(case.given[0][name]) for name in ("ranks", "time"))
    for order in ORDERS:
        if not results[0][f"{order} refused"]:
            odd = time + (ranks if order == "zigzag" else 1)
            needed = "2 P" if order == "zigzag" else "P"
            raise Wrong(
                f"positions({order!r}, {ranks}, 0, {odd}) raises no ValueError, though "
                f"{needed} does not divide {odd}"
            )


# ---------------------------------------------------------------- who meets whom


def run_meeting(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Return which of a rank's queries see which of another's keys, by `meeting`, and how many
    pairs are computed.
    """
    order, ranks, time = ORDERS[int(given["order"])], int(given["ranks"]), int(given["time"])
    seen = np.zeros((ranks, ranks, time, time), bool)
    work, there = np.zeros((ranks, ranks)), np.zeros((ranks, ranks), bool)
    for mine in range(ranks):
        for source in range(ranks):
            met = exercise.meeting(order, mine, source, time)
            if met is None:
                continue
            there[mine, source] = True
            try:
                queries, keys, causal = (
                    np.arange(time)[met.queries],
                    np.arange(time)[met.keys],
                    bool(met.causal),
                )
            except (AttributeError, IndexError, TypeError) as error:
                raise Wrong(
                    f"meeting({order!r}, {mine}, {source}, {time}) is {met!r}: return a "
                    "Meeting of slices, or None"
                ) from error
            mask = np.ones((len(queries), len(keys)), bool)
            seen[mine, source][np.ix_(queries, keys)] = np.tril(mask) if causal else mask
            work[mine, source] = mask.size / (2 if causal else 1)
    return {"seen": seen, "work": work, "there": there}


def judge_meeting(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """A query sees a key exactly if its position is not less."""
    given = case.given[0]
    order, ranks, time = ORDERS[int(given["order"])], int(given["ranks"]), int(given["time"])
    places = [expected_positions(order, ranks, rank, ranks * time) for rank in range(ranks)]
    result = results[0]
    for mine in range(ranks):
        for source in range(ranks):
            expected = places[mine][:, None] >= places[source]
            seen, name = (
                result["seen"][mine, source],
                f"meeting({order!r}, {mine}, {source}, {time})",
            )
            if not np.array_equal(seen, expected):
                query, key = (int(i) for i in np.argwhere(seen != expected)[0])
                verb = "lets" if seen[query, key] else "does not let"
                pairs = [(a, b) for a in range(ranks) for b in range(ranks)]
                told = [stories(order, a, b, time) for a, b in pairs]
                every = [result["seen"][pair] for pair in pairs]
                hint = ""
                for story in dict.fromkeys(story for one in told for story in one):
                    right = [places[a][:, None] >= places[b] for a, b in pairs]
                    each = [one.get(story, own) for one, own in zip(told, right, strict=True)]
                    if not hint and all(map(np.array_equal, every, each)):
                        hint = f": this is what comes out if {story}"
                hint = hint or contract.known(
                    stories(order, mine, source, time), partial(np.array_equal, seen)
                )
                if not hint and (shown := words_of(seen)) and (wanted := words_of(expected)):
                    hint = f": with it {shown}; of these two ranks {wanted}"
                raise Wrong(
                    f"{name} {verb} query {query} see key {key}: the query is at position "
                    f"{places[mine][query]}, the key at {places[source][key]}{hint}"
                )
            if result["there"][mine, source] and not expected.any():
                raise Wrong(
                    f"{name} is a Meeting in which no query sees a key: return None, and nothing "
                    "is computed"
                )
    work = result["work"].sum(1)
    return {f"slowest rank / mean, {order} order": float(work.max() / work.mean())}


def words_of(seen: Array) -> str:
    """Say which queries see which keys, if they are halves, and with which mask; or nothing."""
    time = len(seen)
    parts = {
        "all": slice(None),
        "the first half of": slice(0, time // 2),
        "the second half of": slice(time // 2, None),
    }
    parts |= {"all but the first of": slice(1, None), "all but the last of": slice(0, -1)}
    for queries, rows in parts.items():
        for keys, columns in parts.items():
            for offset, mask in (
                (None, ""),
                (0, ", with the mask j <= i"),
                (-1, ", with the mask j < i"),
            ):
                found = np.zeros_like(seen)
                whole = np.ones(found[rows, columns].shape, bool)
                found[rows, columns] = whole if offset is None else np.tril(whole, offset)
                if np.array_equal(found, seen):
                    return (
                        f"{queries} queries see {keys} keys{mask}"
                        if seen.any()
                        else "no query sees a key"
                    )
    return ""


Rule = Callable[[int, int], bool]  # whether query i of mine sees key j of the source


def stories(order: str, mine: int, source: int, time: int) -> dict[str, Array]:
    """Return what known mistakes let through."""
    half = time // 2
    rules: dict[str, Rule] = {}
    if order != "contiguous":
        rules[
            "the order is taken for contiguous: all keys of an earlier rank, none of a later one"
        ] = lambda i, j: j <= i if mine == source else source < mine
    if mine == source:
        rules |= {
            "a rank's own block is seen in full: within it a query sees no later key": lambda i, j: (
                True
            ),
            "a query does not see its own key": lambda i, j: j < i,
        }
    if order == "zigzag" and source > mine:
        rules |= {
            "only the first half of a later rank's keys is seen: both its chunks lie between "
            "this rank's two": (lambda i, j: i >= half and j < half),
            "a later rank's keys are seen by all queries: they come after this rank's first chunk": lambda i, j: (
                True
            ),
            "a later rank is met as an earlier one: the first half of its keys, by all queries": lambda i, j: (
                j < half
            ),
        }
    if order == "zigzag" and source < mine:
        rules |= {
            "all keys of an earlier rank are seen: its second chunk comes after both of this "
            "rank's": lambda i, j: True,
            "only the second half of the queries sees keys of an earlier rank: its first "
            "chunk comes before both": (lambda i, j: i >= half and j < half),
            "an earlier rank is met as a later one: all of its keys, by the second half of "
            "the queries": (lambda i, j: i >= half),
        }
    if order == "striped" and source > mine:
        rules[
            "the mask is j <= i: the token at the same place on a later rank comes after the "
            "query, so it is strict"
        ] = lambda i, j: j <= i
        rules[
            "the first query and the first key are left out: query i sees keys 1 to i, and key 0 "
            "comes before it"
        ] = lambda i, j: 1 <= j <= i
    if mine != source:
        rules[
            "earlier and later ranks are exchanged: all keys of a later one are seen, and none of "
            "an earlier one"
        ] = lambda i, j: source > mine
    rules |= {
        "the mask is strict, j < i: a rank's token comes after the token at the same place on "
        "an earlier rank": (lambda i, j: j < i),
        "the mask counts places within a rank: all blocks are causal, j <= i": lambda i, j: j <= i,
        "every query sees every key": lambda i, j: True,
        "no query sees a key: none of this block is computed": lambda i, j: False,
    }
    return {
        story: np.array([[rule(i, j) for j in range(time)] for i in range(time)])
        for story, rule in rules.items()
    }
