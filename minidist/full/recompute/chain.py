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
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Point:
    """A point of a frontier: with `room` bytes beside its first input and last gradient, a range
    takes `time` seconds.

    It starts by storing stage `first`, or by recomputing the range of the plan `first`; `rest`
    plans what follows.
    """

    room: int
    time: float
    first: int | Point = field(compare=False)
    rest: Point | None = field(compare=False)

    def plan(self) -> Plan:
        """Return the plan that leads to this point."""
        first = self.first.plan() if isinstance(self.first, Point) else self.first
        rest = self.rest.plan() if self.rest else ()
        return (first, *rest)


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
    found = bisect_right(solutions, budget, key=lambda solution: solution.peak)
    if not found:
        raise ValueError(
            f"no plan for these {len(chain.stages)} stages fits into {budget} bytes: the smallest "
            f"budget that works is {solutions[0].peak}, so raise it, or make the batch smaller"
        )
    return solutions[found - 1]


def tradeoff(chain: Chain, points: int = 500) -> list[Solution]:
    """Return all plans that no other plan beats in both bytes and time, from the smallest to the
    fastest.

    Raises
    ------
    ValueError
        If the chain has no stages.
    """
    count = len(chain.stages)
    if not count:
        raise ValueError("a chain of 0 stages: there is nothing to plan")
    size = [chain.input, *(stage.output for stage in chain.stages)]  # bytes of x_l
    frontiers: dict[tuple[int, int], list[Point]] = {}
    for start in reversed(range(count)):
        for end in range(start + 1, count + 1):
            candidates = _storing(chain, size, frontiers.get((start + 1, end)), start, end)
            for split in range(start + 1, end):
                left, right = frontiers[start, split], frontiers[split, end]
                candidates += _recomputing(chain, size, left, right, start, split, end)
            frontiers[start, end] = _thinned(_undominated(candidates), points)
    always = size[0] + size[count]
    return [
        Solution(point.plan(), point.time, point.room + always) for point in frontiers[0, count]
    ]


def _storing(
    chain: Chain, size: list[int], rest: list[Point] | None, start: int, end: int
) -> list[Point]:
    """Return the plans of start..end-1 that store what stage `start` saves."""
    stage = chain.stages[start]
    own, held = stage.forward + stage.backward, stage.saved + size[start + 1]
    # the last gradient has left its room
    backward = stage.saved + size[start + 1] + size[start] - size[end]
    if rest is None or end == start + 1:
        return [Point(max(held, backward), own, start, None)]
    return [
        Point(max(point.room + held, backward), point.time + own, start, point) for point in rest
    ]


def _recomputing(
    chain: Chain,
    size: list[int],
    left: list[Point],
    right: list[Point],
    start: int,
    split: int,
    end: int,
) -> list[Point]:
    """Return the plans of start..end-1 that pass through start..split-1 first, and recompute it
    after split..end-1.

    There is one for every room at which either side gets faster: the fastest plans of both sides
    that fit.
    """
    passing = sum(chain.stages[stage].forward for stage in range(start, split))
    forward = max(
        [size[start + 1], *(size[stage] + size[stage + 1] for stage in range(start + 1, split))]
    )
    # this gradient has replaced the last one
    left_rooms = [point.room + size[split] - size[end] for point in left]
    right_rooms = [point.room + size[split] for point in right]
    smallest = max(forward, left_rooms[0], right_rooms[0])
    found = []
    for room in {smallest, *(room for room in left_rooms + right_rooms if room > smallest)}:
        again, rest = (
            left[bisect_right(left_rooms, room) - 1],
            right[bisect_right(right_rooms, room) - 1],
        )
        found.append(Point(room, passing + again.time + rest.time, again, rest))
    return found


def _undominated(candidates: list[Point]) -> list[Point]:
    """Return the candidates that are faster than all others with as little room, by increasing
    room.
    """
    kept: list[Point] = []
    for point in sorted(candidates, key=lambda point: (point.room, point.time)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return kept


def _thinned(frontier: list[Point], points: int) -> list[Point]:
    """Leave out points, but never the smallest or the fastest."""
    stride = -(-len(frontier) // points)
    return frontier[:-1][::stride] + frontier[-1:]
