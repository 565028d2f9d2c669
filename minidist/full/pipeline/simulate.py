"""The cost of a plan: when each action starts and ends, how long ranks idle, how much they hold.

    start(action) = max(end of the rank's action before, end of each action it needs, + latency if
    on another rank)

A rank's port to the host works beside its computing. It makes one copy at a time:

    start(copy) = max(end of the rank's action before, end of its copy before)
    start(action) >= end of the FETCH of its stage before

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from minidist.full.pipeline.actions import COMPUTING, TRANSFERS, Action, Kind, Plan
from minidist.full.pipeline.order import Key, in_order

Cost = float | Sequence[float]  # of every stage, or of each
Span = tuple[Action, float, float]  # with its start and its end


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

    def spans(self, rank: int) -> list[Span]:
        """Return a rank's actions in order, each with its start and its end; without those of its
        port to the host.
        """
        return [span for span in self._all(rank) if span[0].kind not in TRANSFERS]

    def transfers(self, rank: int) -> list[Span]:
        """Return the copies that a rank's port to the host makes, each with its start and its
        end.
        """
        return [span for span in self._all(rank) if span[0].kind in TRANSFERS]

    def _all(self, rank: int) -> Iterator[Span]:
        return zip(self.plan.actions[rank], self.start[rank], self.end[rank], strict=True)

    @cached_property
    def length(self) -> float:
        """How long the step takes: from time 0 until the last rank is done."""
        return max((max(row) for row in self.end if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes or reduces."""
        rows = map(self.spans, range(self.plan.ranks))
        return tuple(math.fsum(end - start for _, start, end in row) for row in rows)

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


class Course(NamedTuple):
    """A plan that is ready for the clock, again and again: without its messages, and its actions in an
    order in which they can happen.

    Each step is a rank, its action, and for what that waits: numbers of steps before it, and whether
    those are on the same rank.
    """

    plan: Plan
    steps: list[tuple[int, Action, list[tuple[int, bool]]]]


def course(plan: Plan) -> Course:
    """Return a plan that is ready for the clock.

    Raises
    ------
    ScheduleError
        If the plan gets stuck.
    """
    plan = plan.compute_only()
    steps = []
    # number and rank of each step so far, by its key
    numbers: dict[Key, tuple[int, int]] = {}
    for number, (rank, action, needed) in enumerate(in_order(plan)):
        waits = []
        for key in needed:
            step, on = numbers[key]
            waits.append((step, on == rank))
        steps.append((rank, action, waits))
        numbers[action.key] = number, rank
    return Course(plan, steps)


def simulate(
    plan: Plan | Course,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    input: Cost = 1.0,
    weight: Cost = 1.0,
    latency: float = 0.0,
    reduce: Cost = 0.0,
    update: Cost = 0.0,
    transfer: Cost = 0.0,
) -> Timeline:
    """Run the plan on a clock: a plan, or a course of one, which is faster if it is run often.

    `forward`, `backward`, `input`, `weight`, `reduce` and `update` are the times of F, B, I, W, R
    and U.

    `transfer` is that of a copy of a stage's weights to the host or back: of each FETCH, and of the
    first OFF of each stage. Weights do not change within a step, so a later OFF copies nothing.

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
    plan, steps = plan if isinstance(plan, Course) else course(plan)
    given = {
        Kind.FORWARD: ("forward", forward),
        Kind.BACKWARD: ("backward", backward),
        Kind.INPUTS: ("input", input),
        Kind.WEIGHTS: ("weight", weight),
        Kind.REDUCE: ("reduce", reduce),
        Kind.UPDATE: ("update", update),
        Kind.FETCH: ("transfer", transfer),
    }
    costs = {kind: times_of(name, cost, plan.stages) for kind, (name, cost) in given.items()}
    costs[Kind.OFFLOAD] = costs[Kind.FETCH]
    times_of("latency", latency, 1)
    starts: list[list[float]] = [[] for _ in range(plan.ranks)]
    ends: list[list[float]] = [[] for _ in range(plan.ranks)]
    done: list[float] = []  # when each step ended
    clock = [0.0] * plan.ranks  # when a rank has done what it has computed so far
    port = [0.0] * plan.ranks  # the same of its port to the host
    back = [0.0] * plan.stages  # when the weights of a stage were last brought back
    for rank, (kind, stage, number), waits in steps:
        cost = costs[kind][stage]
        moment = clock[rank]
        for step, here in waits:
            moment = max(moment, done[step] + (0.0 if here else latency))
        if kind in TRANSFERS:
            moment = max(moment, port[rank])
            end = moment + cost
            if kind == Kind.FETCH:
                back[stage] = end
            elif number > 0:
                end = moment  # the copy of the first time is still right
            port[rank] = end
        else:
            if kind in COMPUTING:
                moment = max(moment, back[stage])
            end = moment + cost
            clock[rank] = end
        starts[rank].append(moment)
        ends[rank].append(end)
        done.append(end)
    return Timeline(plan, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def times_of(name: str, cost: Cost, stages: int) -> Sequence[float]:
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
