"""Which layout? Try all of them, one after the other: refuse what does not fit, and keep the
fastest.

    for tp, pp, cp, ep; for microbatch; for ZeRO, shards, recomputing; for schedule, chunks:
        refuse what divides nothing, or holds more than a GPU has     (memory.py)
        time the rest in closed form                                  (step.py)
    run the plans of the best on a clock, and sort those again

Some ten thousand layouts at a fraction of a millisecond: nothing cleverer is needed. (Alpa and
Galvatron, which search graphs of operators, need solvers.)
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from minidist.plan.device import PlanError
from minidist.plan.memory import GB
from minidist.plan.run import Setup
from minidist.plan.search.batches import batch_that_suits, nearest_batch
from minidist.plan.search.choices import check_fixed
from minidist.plan.search.fitting import fitting
from minidist.plan.search.found import Answer, Found, shares
from minidist.plan.stages import clocked_actions
from minidist.plan.step import step

FINALISTS = 24
VARIANTS = 4  # at most so many finalists have equal axes and shards
ACTIONS = 60_000  # at most so many of their plans are put on a clock: each takes some microseconds


def search(start: Setup, fixed: Mapping[str, Any] | None = None, reserve: float = 0.0) -> Answer:
    """Return the layouts of a run on its machine.

    Parameters
    ----------
    fixed : mapping, optional
        Fields of `Setup` that are not looked for.
    reserve : float
        The share of a GPU's memory that has to stay free; the command keeps `RESERVE`.

    Raises
    ------
    PlanError
        If a fixed field is unknown, or nothing fits; the message says what came nearest.
    """
    fixed = dict(fixed or {})
    check_fixed(fixed)
    refused: Counter[str] = Counter()
    found, smallest = fitting(start, fixed, reserve, refused)
    asked = start.batch
    batch, saved = batch_that_suits(start, fixed, reserve, found)
    if batch != asked:
        refused.clear()
        found, smallest = fitting(replace(start, batch=batch), fixed, reserve, refused)
    if not found:
        raise PlanError(nothing_fits(start, fixed, reserve, +refused, smallest))
    found.sort(key=lambda each: each.seconds)
    first, rest = finalists(found)
    timed = [replace(each, step=step(each.run, exact=True)) for each in first]
    timed.sort(key=lambda each: each.seconds)
    return Answer((*timed, *rest), +refused, asked, saved)


def nothing_fits(
    start: Setup,
    fixed: Mapping[str, Any],
    reserve: float,
    refused: Counter[str],
    smallest: float,
) -> str:
    """Return the sentence that says why no layout fits, and what came nearest."""
    reasons = [f"{count:,} {reason}" for reason, count in refused.most_common(3)]
    near = ""
    if smallest < float("inf"):
        near = f"; the smallest holds {smallest / GB:,.0f} GB a GPU"
    near += nearest_batch(start, fixed, reserve, refused)
    machine = f"{start.machine.total:,} GPUs of {start.machine.name}"
    return f"no layout fits {machine}: {'; '.join(reasons)}{near}"


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
