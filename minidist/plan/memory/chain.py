"""Find the best plan for a budget of bytes: which activations to store, and which to recompute.

    plan          (0, (1, 2), 3)       backward recomputes what stands in parentheses from its input, here x1
    forward       store 0 ─▶ keep x1, forward 1 ─▶ forward 2 ─▶ store 3
    backward      backward 3 ─▶ store 1 ─▶ store 2 ─▶ backward 2 ─▶ backward 1 ─▶ backward 0

Parentheses nest: `((0, (1, 2)), 3)` computes 1 and 2 three times. The best plan of stages s..t
starts in one of two ways:

    store s            then follow the best plan of s+1..t, while holding what s saves
    recompute s..j-1   then follow the best plan of j..t, while holding x_s; when j..t is done, follow that of s..j-1

Every plan needs some bytes and some time. The plans of s..t that no other plan beats in both are
the *frontier* of s..t, a staircase. Each of the two ways combines the staircases of shorter ranges
(dynamic programming), without rounding bytes. Segments of equal lengths are plans too, so the best
plan is never slower. (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains",
section 4. Chen et al. 2016, "Training deep nets with sublinear memory cost": segments of √L
stages.)

Cost: O(L³ * F) steps for L stages and F points of a frontier. Equal stages have few points;
`points` is the most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from minidist.full.recompute.segments import Plan


@dataclass(frozen=True)
class Stage:
    """One link of a chain. Stage l maps x_l to x_{l+1}.

    Attributes
    ----------
    forward, backward : float
        Seconds.
    output : int
        Bytes of x_{l+1}; its gradient has as many.
    saved : int
        Bytes that the forward saves for the backward, besides x_l.
    """

    forward: float
    backward: float
    output: int
    saved: int


@dataclass(frozen=True)
class Chain:
    """Stages, and the bytes of the first stage's input."""

    stages: tuple[Stage, ...]
    input: int


@dataclass(frozen=True)
class Solution:
    """A plan, its time in seconds, and the bytes of activations and their gradients at its peak."""

    plan: Plan
    time: float
    peak: int


class Point(NamedTuple):
    """A point of a frontier: with `room` bytes beyond its first input and last gradient, a range
    takes `time` seconds.
    """

    room: int
    time: float
    plan: Plan


def best_plan(chain: Chain, budget: int, points: int = 500) -> Solution:
    """Return the fastest plan whose activations, with the chain's input and last gradient, fit into
    `budget` bytes.

    The result is exact if no frontier has more than `points` points. Longer frontiers are thinned:
    then the plan may be slower than the best, but it never exceeds the budget.

    Raises
    ------
    ValueError
        If no plan fits; the message names the smallest budget that works.
    """
    solutions = tradeoff(chain, points)
    fitting = [solution for solution in solutions if solution.peak <= budget]
    if not fitting:
        raise ValueError(
            f"no plan for these {len(chain.stages)} stages fits into {budget} bytes: the smallest "
            f"budget that works is {solutions[0].peak}, so raise it, or make the batch smaller"
        )
    return fitting[-1]


def tradeoff(chain: Chain, points: int = 500) -> list[Solution]:
    """Return all plans that no other plan beats in both bytes and time, from the smallest to the
    fastest.

    Raises
    ------
    ValueError
        If the chain has no stages.
    """
    stages, count = chain.stages, len(chain.stages)
    if not count:
        raise ValueError("a chain of 0 stages: there is nothing to plan")
    size = [chain.input, *(stage.output for stage in stages)]  # bytes of x_l
    nothing = Point(0, 0.0, ())
    frontiers = {(end, end): [nothing] for end in range(count + 1)}
    for start in reversed(range(count)):
        stage = stages[start]
        held = stage.saved + size[start + 1]
        for end in range(start + 1, count + 1):
            # Store stage `start`. In its backward, the last gradient has left its room.
            backward = stage.saved + size[start + 1] + size[start] - size[end]
            found = [
                Point(
                    max(rest.room + held, backward),
                    rest.time + (stage.forward + stage.backward),
                    (start, *rest.plan),
                )
                for rest in frontiers[start + 1, end]
            ]
            for split in range(start + 1, end):
                again, rests = frontiers[start, split], frontiers[split, end]
                found += recomputing(
                    stages[start:split], size[start : split + 1], size[end], again, rests
                )
            frontiers[start, end] = frontier(found, points)
    always = size[0] + size[count]
    return [Solution(plan, time, room + always) for room, time, plan in frontiers[0, count]]


def recomputing(
    passed: Sequence[Stage], size: list[int], last: int, again: list[Point], rests: list[Point]
) -> list[Point]:
    """Return the plans that pass through some stages first, and recompute them after the rest.

    There is one for every room at which either side gets faster: the fastest plans of both sides
    that fit.
    """
    passing = sum(stage.forward for stage in passed)
    forward = max([size[1], *map(sum, pairwise(size[1:]))])
    # The rest has an input more. When it is done, the gradient of that has replaced the last one.
    again_rooms = [point.room + size[-1] - last for point in again]
    rest_rooms = [point.room + size[-1] for point in rests]
    smallest = max(forward, again_rooms[0], rest_rooms[0])
    found = []
    for room in {smallest, *(room for room in again_rooms + rest_rooms if room > smallest)}:
        inner = again[bisect_right(again_rooms, room) - 1]
        rest = rests[bisect_right(rest_rooms, room) - 1]
        time = passing + inner.time + rest.time
        found.append(Point(room, time, (inner.plan, *rest.plan)))
    return found


def frontier(candidates: list[Point], points: int) -> list[Point]:
    """Return the candidates that are faster than all others with as little room, by increasing
    room; of a longer list, some `points`.
    """
    kept: list[Point] = []
    for point in sorted(candidates, key=itemgetter(0, 1)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    # The smallest and the fastest stay.
    return kept[:-1][:: -(-len(kept) // points)] + kept[-1:]
