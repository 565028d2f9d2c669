"""The cost of a plan: when each action starts and ends, how long ranks idle, how much they hold.

    start(action) = max(end of the rank's action before, end of each action it needs, + latency if
    on another rank)

An idle share is easily misquoted, so there are two, by name:

    bubble   idle / (ranks * length of the step)          how much of the machine's time is lost
    ratio    idle / (time that the computing takes)       how much longer the step takes than the ideal

The papers' formulas, for p ranks, m microbatches, v chunks a rank, equal stages and no latency;
tests compare the plans with them:

                 bubble: share of the step   ratio: to the ideal
    naive        (p - 1) / p                 p - 1
    gpipe, 1f1b  (p - 1) / (m + p - 1)       (p - 1) / m
    interleaved  (p - 1) / (v m + p - 1)     (p - 1) / (v m)
    zb-h1        idle time of a rank: (p - 1)(F + I - W), from m = p on
    zb1p         the same, but of stages that have 1/v of the layers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub

from minidist.parallel.pipeline.actions import Action, Kind, Plan
from minidist.parallel.pipeline.order import execution_order, needs

Cost = float | Sequence[float]  # of every stage, or of each


@dataclass(frozen=True)
class Timeline:
    """A plan on the clock.

    Attributes
    ----------
    plan : Plan
        Without sends and receives.
    start, end : tuple of tuples of float
        When each action starts and ends, by rank and position, in the unit of the costs.
    """

    plan: Plan
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    def spans(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return a rank's actions in order, each with its start and its end."""
        return [
            *zip(
                self.plan.actions[rank],
                self.start[rank],
                self.end[rank],
                strict=True,
            )
        ]

    @cached_property
    def length(self) -> float:
        """How long the step takes: from time 0 until the last rank is done."""
        return max((row[-1] for row in self.end if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes or reduces."""
        rows = zip(self.start, self.end, strict=True)
        return tuple(math.fsum(map(sub, ends, starts)) for starts, ends in rows)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits, also before its first and after its last action."""
        return tuple(self.length - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Which share of the step all ranks together are idle: from 0 to 1."""
        return sum(self.idle) / (self.length * self.plan.ranks) if self.length else 0.0

    @property
    def ratio(self) -> float:
        """Idle time divided by computing time, over all ranks: with 1 the step takes twice the
        ideal.
        """
        return sum(self.idle) / sum(self.busy) if self.length else 0.0


def simulate(
    plan: Plan,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    input: Cost = 1.0,
    weight: Cost = 1.0,
    latency: float = 0.0,
    reduce: Cost = 0.0,
    update: Cost = 0.0,
) -> Timeline:
    """Run the plan on a clock.

    `forward`, `backward`, `input`, `weight`, `reduce` and `update` are the times of F, B, I, W, R
    and U.

    A time may be one for all stages, or one for each. Times may have any unit. By default a
    reduction takes none, because most of it hides behind the backward before it. Sends and receives
    are left out: a result reaches another rank `latency` after it was computed, as it does if the
    receive was posted early. That delays the other rank, but keeps no rank busy.

    Raises
    ------
    ValueError
        If a cost is negative or not finite.
    ScheduleError
        If the plan gets stuck.
    """
    plan = plan.compute_only()
    given = {
        Kind.FORWARD: ("forward", forward),
        Kind.BACKWARD: ("backward", backward),
        Kind.INPUTS: ("input", input),
        Kind.WEIGHTS: ("weight", weight),
        Kind.REDUCE: ("reduce", reduce),
        Kind.UPDATE: ("update", update),
    }
    costs = {kind: _times(name, cost, plan.stages) for kind, (name, cost) in given.items()}
    _times("latency", latency, 1)
    starts: list[list[float]] = [[] for _ in range(plan.ranks)]
    ends: list[list[float]] = [[] for _ in range(plan.ranks)]
    done: dict[Action, float] = {}
    for rank, position in execution_order(plan):
        action = plan.actions[rank][position]
        moment = ends[rank][-1] if ends[rank] else 0.0
        for key in needs(action, plan):
            here = plan.rank_of[key.stage] == rank
            moment = max(moment, done[key] + (0.0 if here else latency))
        starts[rank].append(moment)
        ends[rank].append(moment + costs[action.kind][action.stage])
        done[action.key] = ends[rank][-1]
    return Timeline(plan, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _times(name: str, cost: Cost, stages: int) -> Sequence[float]:
    """Return the cost of each stage. Raises ValueError unless they are times."""
    times = cost if isinstance(cost, Sequence) else [cost] * stages
    if not all(0 <= time < math.inf for time in times):
        raise ValueError(
            f"{name}={[*times]} is no time: give numbers that are finite and not negative"
        )
    return times


def peak_activations(plan: Plan) -> tuple[int, ...]:
    """Return for each rank the most activations that it holds at a time: F is done, and B or I is
    not.

    The unit is what one stage saves of one microbatch. `peak_deferred` counts what W needs
    afterwards.
    """
    return tuple(
        _peak(
            row,
            {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUTS: -1},
        )
        for row in plan.actions
    )


def peak_deferred(plan: Plan) -> tuple[int, ...]:
    """Return for each rank the most stages and microbatches for which I is done at a time, and W is
    not.

    For each of them the rank keeps the inputs of layers and the gradients of their outputs, but no
    other activations.
    """
    return tuple(_peak(row, {Kind.INPUTS: 1, Kind.WEIGHTS: -1}) for row in plan.actions)


def _peak(row: tuple[Action, ...], change: dict[Kind, int]) -> int:
    return max(accumulate((change.get(action.kind, 0) for action in row), initial=0))
