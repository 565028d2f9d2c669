"""Lesson 22, task 3: weights of different age, the known mistakes, and the judges."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sin
from numbers import Integral, Real
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

BACKWARD, UPDATE = 1000, -1  # a forward is its microbatch, a backward that and 1000


def row_of(codes: Sequence[int]) -> list[str]:
    """Return a row in words."""
    words = []
    for code in codes:
        if code == UPDATE:
            words.append("U")
        else:
            words.append(f"B{code - BACKWARD}" if code >= BACKWARD else f"F{code}")
    return words


def codes_of(row: Sequence[str]) -> list[int]:
    """Return words as numbers."""
    found = []
    for word in row:
        if word == "U":
            found.append(UPDATE)
        else:
            found.append(int(word[1:]) + BACKWARD * (word[0] == "B"))
    return found


def aged(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the first half of task 3."""
    row = row_of(given["row"].tolist())
    found = exercise.old_weights(list(row), int(given["batch"]))
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"old_weights returns {found!r}, expected (delays, copies)")
    delays, copies = found
    if not isinstance(copies, Integral) or not hasattr(delays, "__iter__"):
        raise Wrong(f"old_weights returns {found!r}, expected a list of int and an int")
    return {"delays": np.array(list(delays), np.float64), "copies": int(copies)}


def rated(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the second half of task 3."""
    found = []
    for curvature, delay in given["asked"].tolist():
        rate = exercise.largest_rate(curvature, int(delay))
        if not isinstance(rate, Real):
            raise Wrong(f"largest_rate returns {rate!r}, expected a number")
        found.append(float(rate))
    return {"found": np.array(found)}


# ---------------------------------------------------------------- the age of gradients


def versions_of(row: Sequence[str], batch: int, how: str = "") -> list[int]:
    """Return the version that each batch uses; `how` is one of `AGES`."""
    updates, uses = 0, dict[int, int]()
    backwards = dict[int, int]()
    for word in row:
        if word == "U":
            updates += 1
        else:
            number = int(word[1:]) // batch
            if word[0] == "B":
                backwards[number] = updates
            elif how == "of the last forward" or number not in uses:
                uses[number] = updates
    if how == "of the backward":
        uses = backwards
    if how == "always one behind":
        uses = {number: max(0, number - 1) for number in uses}
    if how == "of the first batch":
        uses = dict.fromkeys(uses, 0)
    return [uses[number] for number in sorted(uses)]


def delays_of(row: Sequence[str], batch: int, how: str = "") -> list[int]:
    """Return d of each update; `how` is one of `AGES`."""
    versions = versions_of(row, batch, how)
    delays = [t - version + 1 for t, version in enumerate(versions)]
    if how == "age":
        return [each - 1 for each in delays]
    if how == "one more":
        return [each + 1 for each in delays]
    if how == "versions":
        return versions
    if how == "in microbatches":
        return microbatches_between(row, batch)
    if how == "of each microbatch":
        return delays_of(row, 1) if batch > 1 else delays
    return [max(delays)] * len(delays) if how == "the largest for all" else delays


def microbatches_between(row: Sequence[str], batch: int) -> list[int]:
    """Return how many backwards come between the first forward of a batch and its update."""
    found = []
    for number in range(sum(word == "U" for word in row)):
        first = row.index(f"F{number * batch}")
        last = row.index(f"B{(number + 1) * batch - 1}")
        found.append(sum(word[0] == "B" for word in row[first : last + 1]))
    return found


AGES = {
    "of the backward": "a backward uses the newest weights: it has to use those of its forward",
    "of the last forward": "a batch uses the version that is there at its last forward, not at its "
    "first",
    "age": "the age is counted, d - 1: d is 1 for the gradient of the weights that are updated",
    "one more": "d is counted from the version that the update makes",
    "versions": "the versions are returned, not how old they are",
    "in microbatches": "microbatches are counted, not updates",
    "always one behind": "each batch uses the version before the last update, as 2BW does, not the "
    "newest",
    "of the first batch": "all batches use version 0",
    "of each microbatch": "each microbatch has a version and a delay of its own; a batch has one, and so "
    "has its update",
    "the largest for all": "the largest delay is returned for all updates: the first gradients are "
    "younger",
}


# ---------------------------------------------------------------- copies


def copies_of(row: Sequence[str], batch: int, how: str = "") -> int:
    """Return the most versions held at the same time; `how` is one of `COPIES`."""
    versions = versions_of(row, batch)
    if how == "largest delay":
        return max(delays_of(row, batch))
    if how == "all":
        return len(versions) + 1
    if how in ("all that are used", "and the newest"):
        return len(set(versions)) + (how == "and the newest")
    if how == "in flight":
        return most_in_flight(row)
    if how == "batches in flight":
        return most_batches(row, batch)
    most = 0 if how == "without the newest" else 1
    if how in ("one", "two"):
        return 1 + (how == "two")
    updates = 0
    for position, word in enumerate(row):
        if word != "U":
            continue
        updates += 1
        kinds = "F" if how == "until the last forward" else "FB"
        later = row[position:]
        used = {
            versions[int(each[1:]) // batch] for each in later if each[0] in kinds and each != "U"
        }
        held = {version for version in used if version < updates}
        if how != "without the newest":
            held.add(updates)
        if how == "and the one before":
            held.add(updates - 1)
        most = max(most, len(held))
    return most


def most_in_flight(row: Sequence[str]) -> int:
    """Return the most microbatches whose backward has not run yet."""
    now = most = 0
    for word in row:
        now += (word[0] == "F") - (word[0] == "B")
        most = max(most, now)
    return most


def most_batches(row: Sequence[str], batch: int) -> int:
    """Return the most batches that have begun, and not ended."""
    begun, ended, most = set[int](), 0, 0
    for word in row:
        if word == "U":
            ended += 1
        elif word[0] == "F":
            begun.add(int(word[1:]) // batch)
        most = max(most, len(begun) - ended)
    return most


COPIES = {
    "largest delay": "the largest delay is taken for the copies: versions in between that nobody uses "
    "are not held",
    "in flight": "microbatches in flight are counted, not versions: several may use the same one",
    "batches in flight": "batches in flight are counted, not versions: several may use the same one, "
    "and the newest is held in any case",
    "without the newest": "the newest version is forgotten: it is always held",
    "until the last forward": "a version is given up after its last forward: the backward needs it, too",
    "and the one before": "an update writes into new memory even if nobody needs the old version",
    "all": "all versions that there ever were are held",
    "all that are used": "all versions that are ever used count, not those at the same time",
    "and the newest": "all versions that are ever used count, and one more, not those at the same time",
    "two": "two versions are always held",
    "one": "no older version is held",
}


def rows_told_apart(row: Sequence[str], batch: int) -> bool:
    """Tell whether each of these mistakes gives something else than what is right."""
    ages = ["of the backward", "always one behind"] + ["of the last forward"] * (batch > 1)
    counts = ("largest delay", "in flight", "without the newest", "until the last forward")
    right, copies = delays_of(row, batch), copies_of(row, batch)
    return all(delays_of(row, batch, how) != right for how in ages) and all(
        copies_of(row, batch, how) != copies for how in counts
    )


def judge_old(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Delays, then copies."""
    given, result = case.given[0], results[0]
    row, batch = row_of(given["row"].tolist()), int(given["batch"])
    told = f"{case.label}: {' '.join(row[:16])}{' ...' if len(row) > 16 else ''}, batch={batch}"
    found = result["delays"].tolist()
    expected = delays_of(row, batch)
    if found != expected:
        ways = {clause: delays_of(row, batch, how) for how, clause in AGES.items()}
        shown = [int(each) if each == int(each) else each for each in found]
        raise Wrong(
            f"{told}: delays {shown}, expected {expected}" + known(ways, lambda way: way == found)
        )
    copies, right = int(result["copies"]), copies_of(row, batch)
    if copies != right:
        numbers = {clause: copies_of(row, batch, how) for how, clause in COPIES.items()}
        raise Wrong(
            f"{told}: the delays are right, but {copies} copies, expected {right}"
            + known(numbers, lambda number: number == copies)
        )


# ---------------------------------------------------------------- the largest learning rate


def limit(curvature: float, delay: float, how: str = "") -> float:
    """Return the largest learning rate; `how` is one of `RATES`."""
    exact = 2 * sin(pi / (4 * delay - 2))
    rate: float = {
        "no delay": 2.0,
        "always 1": 2.0 if delay == 1 else 1.0,
        "by the delay": 2 / delay,
        "one over the delay": 1 / delay,
        "by the age": 2.0 if delay == 1 else 1 / (delay - 1),
        "one more": 2 * sin(pi / (4 * delay + 2)),
        "one less": 2 * sin(pi / max(2, 4 * delay - 6)),
        "half": exact / 2,
        "twice": 2 * exact,
        "powers of a half": 2.0 ** (2 - delay),
        "odd numbers": 2 / (2 * delay - 1),
        "without swinging": (delay - 1) ** (delay - 1) / delay**delay,
        "always growing": 0.0,
        "root of the curvature": exact * curvature**0.5,
        "times the curvature": exact * curvature**2,
    }.get(how, exact)
    return rate if how == "no curvature" else rate / curvature


RATES = {
    "no delay": "the delay is left out: 2/c is for the gradient of the weights themselves",
    "always 1": "every delay is taken for d = 2",
    "no curvature": "the curvature is left out: lr c counts",
    "by the delay": "2/c is divided by the delay: try it out, it is less than that from d = 3 on",
    "one over the delay": "it is 1/(d c)",
    "by the age": "1/c is divided by the age d - 1",
    "one more": "the delay is counted from 0: d = 1 is the gradient of the weights themselves",
    "one less": "the delay is one too small: x(t - d + 1) is d - 1 updates old",
    "half": "it is half of that",
    "twice": "it is twice that, with which x grows",
    "odd numbers": "it is 2/((2d - 1) c)",
    "without swinging": "x may not even oscillate: it may, as long as it goes to 0",
    "always growing": "x never goes to 0: has lr c its sign in the recurrence?",
    "root of the curvature": "it is divided by the root of c",
    "times the curvature": "it is multiplied by the curvature: the steeper, the smaller",
    "powers of a half": "it is halved for each step of delay",
}


def judge_rates(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Three digits."""
    asked, found = case.given[0]["asked"].tolist(), results[0]["found"]
    for number, (curvature, delay) in enumerate(asked):
        right = limit(curvature, delay)
        if abs(found[number] - right) <= 2e-3 * right:
            continue
        ways = {
            clause: np.array([limit(c, d, how) for c, d in asked]) for how, clause in RATES.items()
        }
        raise Wrong(
            f"curvature {curvature:.6g}, delay {delay:.0f}: largest_rate is {found[number]:.6g}, "
            f"expected {right:.6g}" + known(ways, lambda way: np.allclose(way, found, rtol=2e-3))
        )
