"""Adding the sends and receives, and the reductions over the data axis: from what is computed to what is done.

    rank 0    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1        1f1b, 2 ranks, 2 microbatches

With reductions, the lines end in 0R and in 1R.

The pass puts the actions of all ranks into one line, by the moment at which they end (of two that end together, the
lower rank's comes first). Behind each action it puts the message that the action made, send and receive at once. Then
every rank takes its own part of the line. So

- the two ranks of a pair meet their messages in the same order, as NCCL requires, which has no tags;
- no deadlock is possible, even if each end waits for the other: the first action in the line that is not done can run;
- a receive is posted before the action *during* which its message comes, so the transfer hides behind that action.
  Posting it earlier still would only hold a buffer for longer.

An executor that posts receives (`irecv`) and waits for them where it uses them loses no time to this order. A rank
reduces last, in one go for all its stages; data parallelism that overlaps begins in the backward before (see `step` in
`executor.py`).

Cost: a sort of all actions.
"""

from __future__ import annotations

from dataclasses import replace

from minidist.parallel.pipeline.actions import Action, Kind, Plan
from minidist.parallel.pipeline.simulate import simulate


def with_communication(plan: Plan, reduce: bool = False) -> Plan:
    """Return the plan with a send and a receive for whatever goes from a stage to a stage on another rank.

    A send stands directly behind the F, B or I that made its content. A receive stands before the F, B or I that uses
    it, as early as is safe (above). Messages: 2 for each microbatch and pair of neighbouring stages on different ranks.

    Parameters
    ----------
    plan : Plan
        Which names computing only.
    reduce : bool
        Add a reduction for each stage, too, at the end of its rank's line: for a pipeline with a data axis.

    Raises
    ------
    ScheduleError
        If the plan gets stuck.
    ValueError
        If the plan has sends and receives already, or reductions where `reduce` asks for them.
    """
    if plan.communicates or (reduce and plan.reduces):
        has = "sends and receives" if plan.communicates else "reductions"
        raise ValueError(f"the plan {plan.name} has its {has} already")
    timeline = simulate(plan)
    line = sorted((moment, rank, at) for rank, ends in enumerate(timeline.end) for at, moment in enumerate(ends))
    rows: list[list[Action]] = [[] for _ in range(plan.ranks)]
    for _, rank, position in line:
        action = plan.actions[rank][position]
        rows[rank].append(action)
        for end in plan.message(action):
            rows[plan.rank_of[end.stage]].append(end)
    for rank, row in enumerate(rows):
        row += [Action(Kind.REDUCE, stage) for stage in plan.stages_of(rank) if reduce]
    return replace(plan, actions=tuple(map(tuple, rows)))
