"""Which layouts are put on a clock: a few of each group of the fastest, so that layouts which differ
are among them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from minidist.plan.search.found import Found, shares
from minidist.plan.stages import clocked_actions
from minidist.plan.step import step

FINALISTS = 24
VARIANTS = 4  # at most so many finalists have equal axes and shards
ACTIONS = 60_000  # at most so many of their plans are put on a clock: each takes some microseconds


def on_clock(found: Sequence[Found]) -> list[Found]:
    """Return the layouts, those first that were put on a clock; both are sorted."""
    by_closed_form = sorted(found, key=lambda each: each.seconds)
    first, rest = finalists(by_closed_form)
    timed = [replace(each, step=step(each.run, exact=True)) for each in first]
    timed.sort(key=lambda each: each.seconds)
    return [*timed, *rest]


def finalists(found: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """Return the layouts, which are sorted, in two parts: those that are worth a clock, and the
    others.
    """
    first: list[Found] = []
    rest: list[Found] = []
    alike: Counter[tuple[int, ...]] = Counter()
    left = ACTIONS
    for each in found:
        group = shares(each.run)
        alike[group] += 1
        needed = clocked_actions(each.run)
        if alike[group] <= VARIANTS and len(first) < FINALISTS and needed <= left:
            first.append(each)
            left -= needed
        else:
            rest.append(each)
    return first, rest
