"""`plan check --halves`: constants fitted on half of the rows, and checked on the other half, both
ways.

    half A ──fit──▶ constants ──predict──▶ half B          its errors are those on rows never seen
    half B ──fit──▶ constants ──predict──▶ half A

Rows of one source are shuffled and dealt out to both halves in turn. Each fit starts in the middle
of every constant's range, so that nothing is left in it of what the other half said. Not knowing
better, a constant that no row of a half depends on stays there.

Two fits take some minutes for a thousand rows.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from statistics import StatisticsError
from typing import Any, NamedTuple, TypeAlias

from minidist.plan.device import Constants, table
from minidist.plan.published.check import Compared, compare, name_of
from minidist.plan.published.fields import LeftOut, PublishedRow
from minidist.plan.published.fit import fit, resident

Pairs: TypeAlias = list[tuple[PublishedRow, Compared]]
"""Values beside the rows that they are of."""


class Halves(NamedTuple):
    """Values predicted by constants that were fitted on their own half, and on the other one."""

    seen: Pairs
    unseen: Pairs


def halves(rows: Sequence[PublishedRow], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Return the rows in two parts, each with half of every source."""
    sources: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        sources[name_of(row)].append(row)
    generator = random.Random(seed)
    parts: tuple[list[PublishedRow], list[PublishedRow]] = ([], [])
    turn = 0
    for _, several in sorted(sources.items()):
        for row in generator.sample(several, len(several)):
            parts[turn % 2].append(row)
            turn += 1
    return parts


def unfitted() -> Constants:
    """Return the constants before any row was looked at: fitted ones in the middle of their
    ranges.
    """
    middle = {}
    for name, entry in table("constants").items():
        if entry.get("fitted"):
            low, high = entry["range"]
            middle[name] = sqrt(low * high)
    return Constants.table().but(**middle)


def both_ways(rows: Sequence[PublishedRow], seed: int = 0) -> Halves:
    """Return each value twice: predicted after a fit on its own half, and on the other half."""
    parts = halves(rows, seed)
    found = Halves([], [])
    for own, other in (parts, parts[::-1]):
        known = fit(own, unfitted())
        known = known.but(resident=beside_tensors(own, known))
        found.seen.extend(compared(own, known))
        found.unseen.extend(compared(other, known))
    return found


def beside_tensors(rows: Sequence[PublishedRow], known: Constants) -> float:
    """Return the GB beside tensors as these rows have it; what is known of it if none says any."""
    try:
        return resident(rows, known)
    except StatisticsError:
        return known["resident"]


def compared(rows: Sequence[PublishedRow], known: Constants) -> Pairs:
    """Return each value of the rows that can be predicted."""
    found: Pairs = []
    for row in rows:
        try:
            found += [(row, each) for each in compare(row, known)]
        except LeftOut:
            continue
    return found
