"""Running a plan without computing: in which order can its actions happen, and if in none, who
waits for whom?

    0F0 ──▶ 1F0 ──▶ 2F0          an output waits for the output of the stage before
     │       │       │
     ▼       ▼       ▼
    0B0 ◀── 1B0 ◀── 2B0          a gradient waits for that of the stage behind, and for its own stage's forward

Every rank does its list in order, and stops at an action whose needs are not met. A message is a
*rendezvous*: each end waits until the other has come, too, as a send without a buffer does. A plan
that finishes under these rules finishes under all weaker ones: with buffered sends, or with
receives that are posted before they are used.

Cost: O(1) per action.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Set
from typing import TypeAlias

from minidist.full.pipeline.actions import BACKWARDS, FLOWS, TRANSFERS, Action, Kind, Plan
from minidist.full.pipeline.errors import ScheduleError

Key: TypeAlias = tuple[Kind, int, int]
"""What `Action.key` is: a plain tuple is equal to it, and made faster."""

Step: TypeAlias = tuple[int, Action, list[Key]]
"""A rank, its action, and the keys of the actions that had to be done before."""


def needs(action: Action, plan: Plan) -> list[Action]:
    """Return the keys of the actions that must be done before this one, in a plan with or without
    messages.

    A reduction needs all backwards of its *rank*, because all stages of a rank share buckets of
    gradients.
    """
    kind, stage, microbatch = action
    if kind == Kind.REDUCE:
        return [each.key for each in plan.actions[plan.rank_of[stage]] if each.kind in BACKWARDS]
    if kind in (Kind.WEIGHTS, Kind.UPDATE):
        return [Action(Kind.BACKWARD, stage, microbatch)]
    if kind in TRANSFERS:
        return []  # they wait for each other alone, which stand on the same rank
    flow = FLOWS[kind]
    if kind == flow.send:
        return [Action(flow.content, stage, microbatch)]
    if kind == flow.receive:
        return []  # it needs its other end alone; see `partner`
    own = [] if kind == Kind.FORWARD else [Action(Kind.FORWARD, stage, microbatch)]
    source = stage - flow.step
    if not 0 <= source < plan.stages:
        return own
    if plan.communicates and plan.rank_of[source] != plan.rank_of[stage]:
        return [*own, Action(flow.receive, stage, microbatch)]
    return [*own, Action(flow.content, source, microbatch)]


def partner(action: Action) -> Action:
    """Return the key of a message's other end."""
    flow = FLOWS[action.kind]
    kind = flow.receive if action.kind == flow.send else flow.send
    return Action(kind, action.neighbour, action.microbatch)


def in_order(plan: Plan) -> Iterator[Step]:
    """Yield all actions of the plan in a possible order, if every message is a rendezvous, each with
    its rank and its needs.

    Raises
    ------
    ScheduleError
        If the ranks get stuck; it names the cycle of ranks that wait for each other.
    """
    position = [0] * plan.ranks
    done: set[Key] = set()
    # the ranks that stopped, by what they miss
    blocked: defaultdict[Key, list[int]] = defaultdict(list)
    at_meeting: dict[Action, Step] = {}  # one end of a message, whose rank waits for the other
    ready = deque(range(plan.ranks))
    of_first: dict[tuple[Kind, int], list[Action]] = {}

    def needs_of(action: Action) -> list[Key]:
        """Return what `needs` does, which is the same for all microbatches of a stage."""
        kind, stage, microbatch = action
        if kind == Kind.REDUCE:
            return [*needs(action, plan)]
        first = of_first.get((kind, stage))
        if first is None:
            first = needs(Action(kind, stage), plan)
            of_first[kind, stage] = first
        return [(each.kind, each.stage, microbatch) for each in first]

    while ready:
        rank = ready.popleft()
        row = plan.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            needed = needs_of(action)
            missing = [key for key in needed if key not in done]
            if missing:
                blocked[missing[0]].append(rank)
                break
            finished = [(rank, action, needed)]
            if action.communicates:
                other = at_meeting.pop(partner(action), None)
                if other is None:
                    at_meeting[action.key] = finished[0]
                    break
                finished.insert(0, other)
                ready.append(other[0])
            for step in finished:
                position[step[0]] += 1
                key = step[1].key
                done.add(key)
                if key in blocked:
                    ready.extend(blocked.pop(key))
                yield step
    if any(position[rank] < len(row) for rank, row in enumerate(plan.actions)):
        raise _stuck(plan, position, done)


def _stuck(plan: Plan, position: list[int], done: Set[Key]) -> ScheduleError:
    """Return the error for ranks that all wait: follow who waits for whom until a rank comes
    again.
    """
    rank = next(rank for rank, row in enumerate(plan.actions) if position[rank] < len(row))
    path: dict[int, Action] = {}  # rank: what it waits for
    while rank not in path and position[rank] < len(plan.actions[rank]):
        head = plan.actions[rank][position[rank]]
        missing = [key for key in needs(head, plan) if key not in done]
        path[rank] = missing[0] if missing else partner(head)
        rank = plan.rank_of[path[rank].stage]
    ranks = list(path)
    cycle = ranks[ranks.index(rank) :] if rank in path else ranks[-1:]
    cells = [(each, position[each]) for each in cycle]
    heads = [plan.actions[each][at] for each, at in cells]
    needed = [_name(plan, path[each]) for each in cycle]
    if rank not in path:
        sentence = f"rank {cycle[0]}: {heads[0]} waits for {needed[0]}, which never comes"
    elif len(cycle) == 1:
        sentence = (
            f"rank {rank}, word {position[rank] + 1}: {heads[0]} stands before {needed[0]}, which "
            "it needs"
        )
    else:
        waits = zip(cycle, heads, needed, strict=True)
        links = (f"rank {each} waits at {head} for {key}" for each, head, key in waits)
        sentence = f"deadlock, a cycle of {len(cycle)} ranks: {', '.join(links)}"
    return ScheduleError(sentence, plan.actions, cells)


def _name(plan: Plan, key: Action) -> str:
    """Return the name, in the plan, of the action with this key."""
    row = plan.actions[plan.rank_of[key.stage]]
    return str(next((action for action in row if action.key == key), key))
