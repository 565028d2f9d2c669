"""Is a plan a schedule? It must do everything once, on the right rank, in a possible order, and
without deadlock.

An error is one sentence, and a grid with the failing cell in brackets (`errors.py`). The checks:

    coverage     F once for each stage and microbatch; B once, or I and W once; each message once at each end
    placement    an action stands on the rank that has its stage, and a message goes to another rank
    order        F before B, I before W; a stage's F after its predecessor's, its B after its successor's
    reductions   none, or one for each stage, after all backwards of its rank
    updates      none, or one for each stage and batch, after its backwards and before those of the next
    transfers    OFF and FETCH of a stage in turn, nothing computed between them, and all back at the end
    deadlock     when all ranks run their lists, with rendezvous for messages (`order.py`), none gets stuck
"""

from collections import deque

from minidist.full.pipeline.actions import BACKWARDS, COMPUTING, TRANSFERS, Action, Kind, Plan
from minidist.full.pipeline.errors import Cell, ScheduleError
from minidist.full.pipeline.order import in_order


def check(plan: Plan) -> None:
    """Raise unless the plan can be run, with or without sends, receives and reductions.

    Cost: O(1) for each action, and for each pair of stage and microbatch.

    Raises
    ------
    ScheduleError
        The first fault found, as a sentence and a grid.
    """
    seen: dict[Action, Cell] = {}
    for rank, row in enumerate(plan.actions):
        for position, action in enumerate(row):
            cell = (rank, position)
            _check_place(plan, action, cell)
            if action in seen:
                raise ScheduleError(f"{action} stands twice", plan.actions, [cell, seen[action]])
            seen[action] = cell
        _check_transfers(plan, rank)
    for stage in range(plan.stages):
        for microbatch in range(plan.microbatches):
            _check_coverage(plan, stage, microbatch, seen)
    _check_updates(plan)
    expected = [end for action in seen for end in plan.message(action) if plan.communicates]
    expected += [Action(Kind.REDUCE, stage) for stage in range(plan.stages) if plan.reduces]
    for action in expected:
        if action not in seen:
            raise ScheduleError(
                f"{action} is missing", plan.actions, [seen[action._replace(kind=Kind.FORWARD)]]
            )
    deque(in_order(plan), maxlen=0)  # to the end


def _check_place(plan: Plan, action: Action, cell: Cell) -> None:
    """Check that an action exists in this plan, and stands where it belongs."""
    fault = None
    counted = action.kind in TRANSFERS or 0 <= action.microbatch < plan.microbatches
    if not (0 <= action.stage < plan.stages and counted):
        fault = (
            f"{action} is not of the plan's {plan.stages} stages and {plan.microbatches} "
            "microbatches"
        )
    elif plan.rank_of[action.stage] != cell[0]:
        fault = (
            f"{action} stands on rank {cell[0]}, but stage {action.stage} is on rank "
            f"{plan.rank_of[action.stage]}"
        )
    elif action.communicates:
        other = action.neighbour
        if not 0 <= other < plan.stages:
            fault = f"{action} has no other end: there is no stage {other}"
        elif plan.rank_of[other] == cell[0]:
            fault = f"{action} is needless: stage {other} is on the same rank {cell[0]}"
    if fault:
        raise ScheduleError(fault, plan.actions, [cell])


def _check_updates(plan: Plan) -> None:
    """Check that each batch updates each stage once, with its own gradients and no others."""
    for rank, row in enumerate(plan.actions):
        for stage in plan.stages_of(rank):
            used = 0  # microbatches whose gradients updates have used
            summed = 0  # and those that have run backward
            for position, action in enumerate(row):
                if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.WEIGHTS):
                    summed += 1
                if action.stage == stage and action.kind == Kind.UPDATE:
                    used += plan.batch
                    if not plan.batch or summed != used or action.microbatch + 1 != used:
                        fault = (
                            f"{action} stands behind {summed} backwards of stage {stage}, but an "
                            f"update uses the gradients of {plan.batch} microbatches, up to its own"
                        )
                        raise ScheduleError(fault, plan.actions, [(rank, position)])
            if plan.batch and used != plan.microbatches:
                fault = (
                    f"stage {stage} is updated with {used} of {plan.microbatches} microbatches: an "
                    f"update is missing, after every {plan.batch}"
                )
                raise ScheduleError(fault, plan.actions, [(rank, len(row))])


def _check_transfers(plan: Plan, rank: int) -> None:
    """Check that the weights of each stage are there when the rank computes with them, and when it
    is done.
    """
    times = dict.fromkeys(plan.stages_of(rank), 0)  # that a stage has come back
    left: dict[int, Cell] = {}  # where the `OFF` of those stands that are away
    for position, action in enumerate(plan.actions[rank]):
        kind, stage, number = action
        away = stage in left
        back = Action(Kind.FETCH, stage, times[stage])
        fault = None
        if kind in COMPUTING and away:
            fault = f"{action} stands before {back}, but needs the weights that it brings back"
        elif kind == Kind.OFFLOAD and away:
            fault = f"{action} stands before {back}, so these weights are away already"
        elif kind == Kind.FETCH and not away:
            fault = f"{action} stands where no weights of stage {stage} are away"
        elif kind in TRANSFERS and number != times[stage]:
            fault = f"{action} should be {action._replace(microbatch=times[stage])}"
            fault += f": stage {stage} has come back {times[stage]} times before"
        if fault:
            raise ScheduleError(fault, plan.actions, [(rank, position)])
        if kind == Kind.OFFLOAD:
            left[stage] = (rank, position)
        elif kind == Kind.FETCH:
            del left[stage]
            times[stage] += 1
    for stage, cell in left.items():
        missing = Action(Kind.FETCH, stage, times[stage])
        raise ScheduleError(
            f"{missing} is missing: the step ends without these weights", plan.actions, [cell]
        )


def _check_coverage(plan: Plan, stage: int, microbatch: int, seen: dict[Action, Cell]) -> None:
    """Check that one microbatch goes through one stage once, forward and backward."""
    forward, whole, *halves = (
        Action(kind, stage, microbatch) for kind in (Kind.FORWARD, *BACKWARDS)
    )
    there = [action for action in (forward, whole, *halves) if action in seen]
    if there not in ([forward, whole], [forward, *halves]):
        has = ", ".join(map(str, there)) or "nothing"
        needed = f"{forward}, and either {whole} or both {halves[0]} and {halves[1]}"
        rank = plan.rank_of[stage]
        cell = seen[there[-1]] if there else (rank, len(plan.actions[rank]))
        fault = (
            f"stage {stage}, microbatch {microbatch}: the plan has {has}, but this needs {needed}"
        )
        raise ScheduleError(fault, plan.actions, [cell])
