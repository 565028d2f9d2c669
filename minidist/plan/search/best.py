"""Which layout? Try all of them, one after the other: refuse what does not fit, and keep the
fastest.

    for tp, pp, cp, ep; for microbatch; for ZeRO, shards, recomputing; for schedule, chunks:
        refuse what divides nothing, or holds more than a GPU has     (memory.py)
        time the rest in closed form                                  (step.py)
    run the plans of the best on a clock, and sort those again

Some ten thousand layouts at a fraction of a millisecond: nothing cleverer is needed. (Alpa and
Galvatron, which search graphs of operators, need solvers.)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minidist.plan.device import PlanError
from minidist.plan.run import Setup
from minidist.plan.search.batches import batch_that_suits, nearest_batch
from minidist.plan.search.choices import check_fixed
from minidist.plan.search.clocked import on_clock
from minidist.plan.search.fitting import Tried, fitting
from minidist.plan.search.found import Answer, Found, in_words
from minidist.plan.step import step

MISSED = 0.05  # a layout that lacks memory is named if a step would take so much less


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
    tried = fitting(start, fixed, reserve)
    found = on_clock(tried.found)
    asked = start.batch
    batch, saved = batch_that_suits(start, fixed, reserve, found)
    if batch != asked:
        other = replace(start, batch=batch)
        tried = fitting(other, fixed, reserve)
        found = on_clock(tried.found)
    if not found:
        raise PlanError(nothing_fits(start, fixed, reserve, tried))
    return Answer(
        found=tuple(found),
        refused=+tried.refused,
        asked=asked,
        saved=saved,
        missed=missed(tried, found[0]),
    )


def missed(tried: Tried, best: Found) -> Found | None:
    """Return the fastest of the layouts for which a GPU has nearly memory enough, if it would be
    faster than the best that fits.
    """
    close = (Found(run, step(run), bytes) for run, bytes in tried.close)
    fastest = min(close, key=lambda each: each.seconds, default=best)
    if fastest is best:
        return None
    on_its_clock = step(fastest.run, exact=True)
    exact = replace(fastest, step=on_its_clock)
    if exact.seconds < (1 - MISSED) * best.seconds:
        return exact
    return None


def nothing_fits(start: Setup, fixed: Mapping[str, Any], reserve: float, tried: Tried) -> str:
    """Return the sentence that says why no layout fits, and what came nearest."""
    refused = +tried.refused
    reasons = [f"{count:,} {reason}" for reason, count in refused.most_common(3)]
    near = f"; the smallest holds {in_words(tried.smallest)}" if tried.smallest else ""
    near += nearest_batch(start, fixed, reserve, refused)
    machine = f"{start.machine.total:,} GPUs of {start.machine.name}"
    return f"no layout fits {machine}: {'; '.join(reasons)}{near}"
