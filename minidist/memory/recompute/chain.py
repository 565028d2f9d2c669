"""Which activations to store and which to recompute under a budget of bytes: the best plan.

    plan          (0, (1, 2), 3)       in parentheses: computed again, from its input x1, when backward gets there
    forward       store 0 ─▶ keep x1, forward 1 ─▶ forward 2 ─▶ store 3
    backward      backward 3 ─▶ store 1 ─▶ store 2 ─▶ backward 2 ─▶ backward 1 ─▶ backward 0

Parentheses nest: `((0, (1, 2)), 3)` computes 1 and 2 three times. The best plan of stages s..t starts in one of two
ways:

    store s            then the best plan of s+1..t, beside what s saves
    recompute s..j-1   then the best plan of j..t, beside x_s; then, when j..t is done and gone, that of s..j-1

Each takes some bytes at least, and some time. The plans of s..t that no other beats in both are its *frontier*, a
staircase; the two ways combine the staircases of shorter ranges (dynamic programming), without rounding bytes. Segments
of equal lengths are plans too, so the best plan is never slower. (Beaumont et al. 2019, "Optimal checkpointing for
heterogeneous chains", section 4. Chen et al. 2016, "Training deep nets with sublinear memory cost": segments of √L.)

Cost: O(L³ * F) steps for L stages and F points of a frontier: a handful if the stages are equal, `points` at most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

Plan: TypeAlias = "tuple[int | Plan, ...]"
"""Stages in order: a number is stored, a tuple is recomputed from its input, by the plan it holds."""


@dataclass(frozen=True)
class Stage:
    """One link of a chain, which maps x_l to x_{l+1}.

    Attributes
    ----------
    forward, backward : float
        Seconds.
    output : int
        Bytes of x_{l+1}, and of its gradient.
    saved : int
        Bytes that the forward keeps for the backward, besides x_l.
    """

    forward: float
    backward: float
    output: int
    saved: int


@dataclass(frozen=True)
class Chain:
    """Stages, and the bytes of what enters the first."""

    stages: tuple[Stage, ...]
    input: int

    def bytes_of(self, activation: int) -> int:
        """Size of x_l, the input of stage l and the output of stage l - 1."""
        return self.stages[activation - 1].output if activation else self.input


class Operation(NamedTuple):
    """What is done with a stage.

    `forward` computes x_{l+1} and drops x_l, `keep` computes it and keeps x_l, `store` also keeps what backward needs.
    """

    verb: Literal["forward", "keep", "store", "backward"]
    stage: int


@dataclass(frozen=True)
class Solution:
    """A plan, and what it takes: seconds, and bytes of activations and their gradients at the peak."""

    plan: Plan
    time: float
    peak: int


@dataclass(frozen=True)
class Point:
    """A step of a frontier: with `room` bytes beside its first input and last gradient, a range takes `time` seconds.

    It starts by storing stage `first`, or by recomputing the range that `first` plans; `rest` plans what follows.
    """

    room: int
    time: float
    first: int | Point = field(compare=False)
    rest: Point | None = field(compare=False)

    def plan(self) -> Plan:
        """Write it down."""
        first = self.first.plan() if isinstance(self.first, Point) else self.first
        return (first, *(self.rest.plan() if self.rest else ()))


def best_plan(chain: Chain, budget: int, points: int = 500) -> Solution:
    """Return the fastest plan whose activations, with the chain's input and last gradient, fit into `budget` bytes.

    Exact as long as no frontier has more than `points` points; longer ones are thinned, so that a plan may be slower
    than the best, but is never too large.

    Raises
    ------
    ValueError
        If no plan fits; it names the smallest budget that does.
    """
    solutions = tradeoff(chain, points)
    found = bisect_right(solutions, budget, key=lambda solution: solution.peak)
    if not found:
        raise ValueError(
            f"no plan for these {len(chain.stages)} stages fits into {budget} bytes: "
            f"the smallest budget that works is {solutions[0].peak}, so raise it, or make the batch smaller"
        )
    return solutions[found - 1]


def tradeoff(chain: Chain, points: int = 500) -> list[Solution]:
    """Return all plans that no other beats in both bytes and time, from the smallest to the fastest."""
    count = len(chain.stages)
    if not count:
        raise ValueError("a chain of 0 stages: there is nothing to plan")
    size = [chain.bytes_of(activation) for activation in range(count + 1)]
    frontiers: dict[tuple[int, int], list[Point]] = {}
    for start in reversed(range(count)):
        for end in range(start + 1, count + 1):
            candidates = _storing(chain, size, frontiers.get((start + 1, end)), start, end)
            for split in range(start + 1, end):
                left, right = frontiers[start, split], frontiers[split, end]
                candidates += _recomputing(chain, size, left, right, start, split, end)
            frontiers[start, end] = _thinned(_undominated(candidates), points)
    always = size[0] + size[count]
    return [Solution(point.plan(), point.time, point.room + always) for point in frontiers[0, count]]


def operations(plan: Plan) -> list[Operation]:
    """Return what `plan` does, forward and backward, in order."""
    if not plan:
        return []
    first, rest = plan[0], plan[1:]
    if isinstance(first, int):
        return [Operation("store", first), *operations(rest), Operation("backward", first)]
    start, *others = stages_of(first)
    passing = [Operation("keep", start), *(Operation("forward", stage) for stage in others)]
    return passing + operations(rest) + operations(first)


def stages_of(plan: Plan) -> list[int]:
    """Return the stages of a plan without its parentheses."""
    return [stage for part in plan for stage in ([part] if isinstance(part, int) else stages_of(part))]


def in_segments(lengths: Sequence[int]) -> Plan:
    """Return the plan that recomputes successive segments of these lengths: (2, 1) gives ((0, 1), (2,))."""
    ends = accumulate(lengths)
    return tuple(tuple(range(end - length, end)) for length, end in zip(lengths, ends, strict=True))


def _storing(chain: Chain, size: list[int], rest: list[Point] | None, start: int, end: int) -> list[Point]:
    """Plans of start..end-1 that store what stage `start` saves."""
    stage = chain.stages[start]
    own, held = stage.forward + stage.backward, stage.saved + size[start + 1]
    backward = stage.saved + size[start + 1] + size[start] - size[end]  # the room of the last gradient is free by then
    if rest is None or end == start + 1:
        return [Point(max(held, backward), own, start, None)]
    return [Point(max(point.room + held, backward), point.time + own, start, point) for point in rest]


def _recomputing(
    chain: Chain, size: list[int], left: list[Point], right: list[Point], start: int, split: int, end: int
) -> list[Point]:
    """Plans of start..end-1 that first pass through start..split-1, and come back to it after split..end-1.

    For every room at which either side gets faster: the fastest of both sides that it has room for.
    """
    passing = sum(chain.stages[stage].forward for stage in range(start, split))
    forward = max([size[start + 1], *(size[stage] + size[stage + 1] for stage in range(start + 1, split))])
    left_rooms = [point.room + size[split] - size[end] for point in left]  # now this gradient has taken the last one's
    right_rooms = [point.room + size[split] for point in right]
    smallest = max(forward, left_rooms[0], right_rooms[0])
    found = []
    for room in {smallest, *(room for room in left_rooms + right_rooms if room > smallest)}:
        again, rest = left[bisect_right(left_rooms, room) - 1], right[bisect_right(right_rooms, room) - 1]
        found.append(Point(room, passing + again.time + rest.time, again, rest))
    return found


def _undominated(candidates: list[Point]) -> list[Point]:
    """Keep those that are faster than all that need as little room."""
    kept: list[Point] = []
    for point in sorted(candidates, key=lambda point: (point.room, point.time)):
        if not kept or point.time < kept[-1].time:
            kept.append(point)
    return kept


def _thinned(frontier: list[Point], points: int) -> list[Point]:
    """Leave out points, but neither the smallest nor the fastest."""
    stride = -(-len(frontier) // points)
    return frontier[:-1][::stride] + frontier[-1:]
