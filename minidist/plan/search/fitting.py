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
from minidist.plan.memory import GB, bytes_held
from minidist.plan.run import Setup
from minidist.plan.search.choices import check_fixed, divisors, options
from minidist.plan.search.found import Answer, Found, shares
from minidist.plan.search.layouts import UNEVEN, candidates, orders
from minidist.plan.stages import clocked_actions
from minidist.plan.step import step

FINALISTS = 24
VARIANTS = 4  # at most so many finalists have equal axes and shards
ACTIONS = 60_000  # at most so many of their plans are put on a clock: each takes some microseconds
# of a GPU's memory: what an allocator cannot use, and a batch that is longer than others
RESERVE = 0.05
NEAREST = 3  # batches that divide are tried where none does: each takes a search


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
    if not found:
        raise PlanError(nothing_fits(start, fixed, reserve, +refused, smallest))
    found.sort(key=lambda each: each.seconds)
    first, rest = finalists(found)
    timed = [replace(each, step=step(each.run, exact=True)) for each in first]
    timed.sort(key=lambda each: each.seconds)
    return Answer((*timed, *rest), +refused)


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


def fitting(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Counter[str]
) -> tuple[list[Found], float]:
    """Return the layouts that fit, timed in closed form, and the bytes of a GPU in the smallest of
    all.
    """
    memory = min(site.device.memory for site in start.machine.sites)
    room = memory * (1 - reserve)
    free = f", of which {reserve:.0%} stay free" if reserve else ""
    too_much = f"hold more than the {memory / GB:.0f} GB of a GPU{free}"
    smallest = float("inf")
    found: list[Found] = []
    for offload in options(fixed, "offload"):  # to the host's memory only if nothing fits without
        if found:
            break
        for ladder in candidates(start, {**fixed, "offload": offload}, refused):
            has_two = False
            for run in ladder:
                if has_two and run.zero == 2:
                    continue  # the one before it was faster
                bytes = bytes_held(run)
                total = sum(bytes.values())
                smallest = min(smallest, total)
                if total > room:
                    refused[too_much] += 1
                    continue
                found += [Found(each, step(each), bytes) for each in orders(run, fixed)]
                has_two = run.zero == 2
                if not has_two:
                    break  # what saves more memory is slower
    return found, smallest


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


def nearest_batch(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Mapping[str, int]
) -> str:
    """Name the nearest batch for which a layout fits, if layouts were refused for the batch."""
    if UNEVEN not in refused:
        return ""
    # Replicas are a divisor of the GPUs, and a batch is a multiple of the replicas.
    near = set()
    for replicas in divisors(start.machine.total):
        below = start.batch // replicas
        near |= {max(1, below) * replicas, (below + 1) * replicas}
    tried = 0
    for batch in sorted(near, key=lambda each: abs(each - start.batch)):
        run = replace(start, batch=batch)
        possible = candidates(run, {**fixed, "offload": False}, Counter())
        if next(possible, None) is None:
            continue  # it divides nothing, either
        if fitting(run, fixed, reserve, Counter())[0]:
            return (
                f"; the nearest batch that fits is {batch:,} sequences: --batch "
                f"{batch * start.sequence}"
            )
        tried += 1
        if tried == NEAREST:
            break
    return ""
