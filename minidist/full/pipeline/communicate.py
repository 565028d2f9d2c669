"""Adding messages: a plan that says what is computed becomes a plan with sends, receives and
reductions.

    rank 0    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1        1f1b, 2 ranks, 2 microbatches

With reductions, the lines end in 0R and in 1R.

The pass puts the actions of all ranks into one line, sorted by when they end; of two that end
together, the lower rank's comes first. After each action it puts the message that the action has
made: its send and its receive together. Then every rank takes its own actions out of the line.
Therefore

- the two ranks of a pair see their messages in the same order. NCCL needs this, because it has no
  tags;
- no deadlock is possible, even if each end waits for the other: the first action in the line that
  is not done can run;
- a receive is posted before the action *during* which its message comes, so that action hides the
  transfer. An earlier receive would only hold a buffer for longer.

An executor that posts receives (`irecv`), and waits for them only where it uses them, loses no time
by this order. A rank reduces last, once for all its stages; data parallelism that overlaps begins
in the backward before (see `Pipeline.step` in `executor.py`).

Cost: a sort of all actions.
"""

from dataclasses import replace

from minidist.full.pipeline.actions import Action, Kind, Plan
from minidist.full.pipeline.simulate import simulate


def with_communication(plan: Plan, reduce: bool = False) -> Plan:
    """Return the plan with a send and a receive for everything that goes to a stage on another
    rank.

    A send comes directly after the F, B or I that has made its content. A receive comes before the
    F, B or I that uses it, as early as the module's docstring says. There are 2 messages for each
    microbatch and each pair of neighbouring stages on different ranks.

    Parameters
    ----------
    plan : Plan
        It names only what is computed.
    reduce : bool
        Add a reduction for each stage, too, at the end of its rank's line: for a pipeline with a
        data axis.

    Raises
    ------
    ScheduleError
        If the plan gets stuck.
    ValueError
        If the plan has sends and receives already, or has reductions and `reduce` asks for them.
    """
    if plan.communicates or (reduce and plan.reduces):
        has = "sends and receives" if plan.communicates else "reductions"
        raise ValueError(f"the plan {plan.name} has its {has} already")
    line = []
    for rank, ends in enumerate(simulate(plan).end):
        line += [(moment, rank, at) for at, moment in enumerate(ends)]
    rows: list[list[Action]] = [[] for _ in range(plan.ranks)]
    for _, rank, position in sorted(line):
        action = plan.actions[rank][position]
        rows[rank].append(action)
        for end in plan.message(action):
            rows[plan.rank_of[end.stage]].append(end)
    if reduce:
        for rank, row in enumerate(rows):
            row += [Action(Kind.REDUCE, stage) for stage in plan.stages_of(rank)]
    return replace(plan, actions=tuple(map(tuple, rows)))
