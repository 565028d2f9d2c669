"""Plans of pipelines that are never flushed, and the version of the weights that each forward uses.

    PipeDream    F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...      stage 0 of 3: an update with every microbatch
    2BW          F0 F1 F2 B0 F3 B1 U1 F4 B2 F5 B3 U3 ...   one with every batch, here of 2
    flush        F0 F1 B0 B1 U1 .. F2 F3 B2 B3 U3 ..       the pipeline runs empty before each update

    version of F3 above      PipeDream     1: B0 has led to the first update when F3 runs
                             2BW           0: its batch is the second, and uses what the one before it did not change
                             flush         1: what the batch before has led to

A version is the number of updates that lead to it. A backward uses the version of its forward:
`pipeline.py` keeps that. All stages of 1F1B but the last have several microbatches in flight, so
they keep several versions; `most_versions` counts them from the plan.

                 versions kept by stage s of p      a gradient's age      bubble
    PipeDream    p - s                              p - s - 1 updates     none
    vertical     p                                  p - 1                 none
    2BW          2                                  1                     none
    flush        1                                  0                     (p - 1)/(m + p - 1)

"None" leaves out the beginning and the end of the whole run. (Narayanan et al. 2019, PipeDream,
section 3.3; Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.)
"""

from dataclasses import replace
from typing import TypeAlias

from minidist.full.pipeline.actions import Action, Kind, Plan
from minidist.full.pipeline.check import check
from minidist.full.pipeline.errors import ScheduleError
from minidist.full.pipeline.schedules import plan

Versions: TypeAlias = tuple[tuple[int, ...], ...]
"""By stage and microbatch: how many updates lead to the weights that its forward uses."""


def never_flushed(ranks: int, batches: int, batch: int = 1) -> Plan:
    """Return 1F1B over all microbatches of all batches, with an update after each batch's last
    backward.

    Raises
    ------
    ValueError
        If there is less than one rank, batch, or microbatch in a batch.
    """
    _check_numbers(ranks, batches, batch)
    return _with_updates(plan("1f1b", ranks, batches * batch), batch)


def flushed(ranks: int, batches: int, batch: int) -> Plan:
    """Return 1F1B of one batch after the other: each begins after the update of the one before.

    Raises as `never_flushed`.
    """
    _check_numbers(ranks, batches, batch)
    one = plan("1f1b", ranks, batch)
    rows = []
    for row in one.actions:
        repeated: list[Action] = []
        for number in range(batches):
            first = number * batch
            repeated += [each._replace(microbatch=first + each.microbatch) for each in row]
        rows.append(tuple(repeated))
    whole = replace(one, microbatches=batches * batch, actions=tuple(rows))
    return _with_updates(whole, batch)


def newest(plan: Plan) -> Versions:
    """Return, for each batch and stage, the newest version when the batch's first forward runs:
    weight stashing, as in PipeDream.
    """
    return tuple(
        tuple(
            _updates_before(plan, stage, microbatch - microbatch % plan.batch)
            for microbatch in range(plan.microbatches)
        )
        for stage in range(plan.stages)
    )


def of_first_stage(plan: Plan) -> Versions:
    """Return for all stages the versions of the first one: vertical sync.

    One version of the whole model then sees each microbatch, and the last stages keep old versions
    as long as the first.
    """
    return (newest(plan)[0],) * plan.stages


def one_behind(plan: Plan) -> Versions:
    """Return, for each batch, the version before the last batch's update: 2BW.

    Raises
    ------
    ScheduleError
        If a batch is shorter than the pipeline, whose first stage would need a version that is not
        there yet.
    """
    before = [max(0, number // plan.batch - 1) for number in range(plan.microbatches)]
    versions = (tuple(before),) * plan.stages
    check_versions(plan, versions)
    return versions


def check_versions(plan: Plan, versions: Versions) -> None:
    """Raise unless each version is there when a forward uses it, and a batch uses one only.

    Raises
    ------
    ScheduleError
        The first fault found.
    """
    check(plan)
    for rank, row in enumerate(plan.actions):
        for position, (kind, stage, microbatch) in enumerate(row):
            if kind != Kind.FORWARD:
                continue
            wanted, there = versions[stage][microbatch], _updates_before(plan, stage, microbatch)
            first = versions[stage][microbatch - microbatch % plan.batch]
            fault = ""
            if wanted > there:
                fault = (
                    f"{stage}F{microbatch} uses the weights after {wanted} updates, but only "
                    f"{there} come before it: make a batch of at least {plan.ranks} microbatches"
                )
            elif wanted != first:
                fault = (
                    f"{stage}F{microbatch} uses the weights after {wanted} updates, and another "
                    f"microbatch of its batch those after {first}: one update needs one version"
                )
            if fault:
                raise ScheduleError(fault, plan.actions, [(rank, position)])


def most_versions(plan: Plan, versions: Versions) -> tuple[int, ...]:
    """Return, for each stage, the most versions of its weights that are kept at a time.

    A version is kept while a forward or backward will use it; the newest one always.
    """
    most = []
    for stage in range(plan.stages):
        row = plan.actions[plan.rank_of[stage]]
        mine = [each for each in row if each.stage == stage]
        last_use = {
            versions[stage][each.microbatch]: at
            for at, each in enumerate(mine)
            if each.kind == Kind.BACKWARD
        }
        updates, largest = 0, 1
        for at, each in enumerate(mine):
            if each.kind == Kind.UPDATE:
                updates += 1
                used = [version for version, until in last_use.items() if until > at]
                kept = {version for version in used if version < updates} | {updates}
                largest = max(largest, len(kept))
        most.append(largest)
    return tuple(most)


def _with_updates(without: Plan, batch: int) -> Plan:
    """Return a plan with an update after the last backward of each batch of a stage."""
    rows = []
    for row in without.actions:
        found = []
        for action in row:
            found.append(action)
            if action.kind == Kind.BACKWARD and (action.microbatch + 1) % batch == 0:
                found.append(action._replace(kind=Kind.UPDATE))
        rows.append(tuple(found))
    return replace(without, actions=tuple(rows), batch=batch)


def _updates_before(plan: Plan, stage: int, microbatch: int) -> int:
    """Return how many updates of a stage come before the forward of a microbatch."""
    row = plan.actions[plan.rank_of[stage]]
    until = row.index(Action(Kind.FORWARD, stage, microbatch))
    return sum(each.kind == Kind.UPDATE and each.stage == stage for each in row[:until])


def _check_numbers(ranks: int, batches: int, batch: int) -> None:
    for what, value in (("ranks", ranks), ("batches", batches), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{what}={value}, but a plan needs at least 1")
