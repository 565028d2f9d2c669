"""Which batch? The one that is asked for, unless few layouts divide it.

A replica takes whole microbatches, and interleaved stages take as many microbatches as there are
stages, or a multiple. So of two batches that hardly differ one may have the best layouts and the
other none of them. Batches near the asked one are tried with those layouts that they suit. One that
is x % away has to save more than x % of the GPU hours a token.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minidist.plan.run import Setup
from minidist.plan.search.choices import divisors, options
from minidist.plan.search.clocked import on_clock
from minidist.plan.search.fitting import fitting
from minidist.plan.search.found import Found
from minidist.plan.search.layouts import UNEVEN, axes, candidates

NEAR = 1 / 8  # of the batch: none is planned that is further away
WORTH = 0.02  # at least so much is saved, or the batch stays as it is
NEAREST = 3  # batches that divide are tried where none does: each takes a search


def batch_that_suits(
    start: Setup, fixed: Mapping[str, Any], reserve: float, found: Sequence[Found]
) -> tuple[int, float]:
    """Return the batch that is planned, and which share of the GPU hours a token it saves.

    `found` are the layouts of the batch that is asked for, the best first. The share is 1 where it
    has none.
    """
    near: list[Found] = []
    for offload in offloading(fixed, found):
        here = {**fixed, "offload": offload}
        for batch, some in suited(start, here):
            other = replace(start, batch=batch)
            near += fitting(other, some, reserve).found
        if near:
            break
    if not near:
        return start.batch, 0.0
    # Closed forms find the best of the others, and clocks compare it with what was asked for.
    best = min(near, key=lambda each: counted(start, each))
    same = [each for each in near if each.run.batch == best.run.batch]
    best = on_clock(same)[0]
    batch = best.run.batch
    if not found:
        return batch, 1.0
    asked = found[0].seconds / start.batch
    if counted(start, best) >= asked * (1 - WORTH):
        return start.batch, 0.0
    saved = 1 - best.seconds / batch / asked
    return batch, saved


def counted(start: Setup, other: Found) -> float:
    """Return the seconds a sequence of a layout of another batch, and as much more as it is away."""
    away = abs(other.run.batch / start.batch - 1)
    return other.seconds / other.run.batch * (1 + away)


def offloading(fixed: Mapping[str, Any], found: Sequence[Found]) -> tuple[bool, ...]:
    """Return whether layouts of other batches offload: not where some that do not are found, but
    perhaps where none are.
    """
    kept = any(not each.run.offload for each in found)
    if kept and "offload" not in fixed:
        return (False,)
    return options(fixed, "offload")


def suited(start: Setup, fixed: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield batches near the asked one, each with what it suits: fixed axes and a microbatch."""
    for base in axes(start, fixed, Counter()):
        layout = {"tp": base.tp, "pp": base.pp, "cp": base.cp}
        for microbatch in options(fixed, "microbatch"):
            one = base.dp * microbatch
            near = {max(1, round(start.batch / unit)) * unit for unit in (one, one * base.pp)}
            for batch in near - {start.batch}:
                if abs(batch - start.batch) <= NEAR * start.batch:
                    yield batch, {**layout, **fixed, "microbatch": microbatch}


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
        if fitting(run, fixed, reserve).found:
            return (
                f"; the nearest batch that fits is {batch:,} sequences: --batch "
                f"{batch * start.sequence}"
            )
        tried += 1
        if tried == NEAREST:
            break
    return ""
