"""Running a plan without computing anything: in which order can its actions happen, and what if they cannot?

    0F0 ──▶ 1F0 ──▶ 2F0          an output waits for the output of the stage before
     │       │       │
     ▼       ▼       ▼
    0B0 ◀── 1B0 ◀── 2B0          a gradient waits for that of the stage behind, and for its own stage's forward

Every rank does its list in order and stops at an action whose needs are not met. A message is a *rendezvous*: both its
ends stop until the other is there too, as a send without any buffer does. What finishes under these rules finishes
under all weaker ones: buffered sends, receives posted ahead of their use.

Cost: O(1) per action.
"""

from __future__ import annotations

from collections import defaultdict, deque

from minidist.parallel.pipeline.actions import NEIGHBOUR, Action, Key, Plan
from minidist.parallel.pipeline.errors import Cell, ScheduleError


def needs(action: Action, plan: Plan, communicates: bool) -> list[Key]:
    """Return the keys of what has to be done before this action.

    With `communicates` (`plan.communicates`), what another rank computes has to be received first.
    """
    kind, stage, microbatch, _ = action
    if kind in ("F", "B", "I"):
        own: list[Key] = [] if kind == "F" else [("F", stage, microbatch)]
        kind = "F" if kind == "F" else "B"
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < plan.stages:
            return own
        if communicates and plan.rank_of[other] != plan.rank_of[stage]:
            return [*own, (f"RECV_{kind}", stage, microbatch)]
        return [*own, (kind, other, microbatch)]
    if kind == "W":
        return [("B", stage, microbatch)]
    return [(kind[-1], stage, microbatch)] if kind.startswith("SEND") else []


def partner(action: Action) -> Key:
    """Return the key of a message's other end."""
    kind, stage, microbatch, _ = action
    other = ("RECV" if kind.startswith("SEND") else "SEND") + kind[4:]
    return (other, stage + NEIGHBOUR[kind], microbatch)


def execution_order(plan: Plan) -> list[Cell]:
    """Return all cells of the plan in an order in which they can happen, every message being a rendezvous.

    Raises
    ------
    ScheduleError
        If the ranks get stuck: it names the cycle of those that wait for each other.
    """
    communicates = plan.communicates
    position = [0] * plan.ranks
    order: list[Cell] = []
    done: set[Key] = set()
    blocked: defaultdict[Key, list[int]] = defaultdict(list)  # the ranks that stopped, by what they miss
    at_meeting: dict[Key, int] = {}  # the rank that has come to its end of a message
    ready = deque(range(plan.ranks))

    def finish(rank: int, action: Action) -> None:
        order.append((rank, position[rank]))
        position[rank] += 1
        key = action.key
        done.add(key)
        if key in blocked:
            ready.extend(blocked.pop(key))

    while ready:
        rank = ready.popleft()
        row = plan.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            missing = next((key for key in needs(action, plan, communicates) if key not in done), None)
            if missing is not None:
                blocked[missing].append(rank)
                break
            if action.communicates:
                other = at_meeting.pop(partner(action), None)
                if other is None:
                    at_meeting[action.key] = rank
                    break
                finish(other, plan.actions[other][position[other]])
                ready.append(other)
            finish(rank, action)
    if len(order) < sum(map(len, plan.actions)):
        raise _stuck(plan, position, done)
    return order


def _stuck(plan: Plan, position: list[int], done: set[Key]) -> ScheduleError:
    """Return the error for ranks that all wait: follow who waits for whom, to a cycle."""
    rank = next(rank for rank, row in enumerate(plan.actions) if position[rank] < len(row))
    path: dict[int, Key] = {}  # rank: what it waits for
    while rank not in path and position[rank] < len(plan.actions[rank]):
        head = plan.actions[rank][position[rank]]
        missing = [key for key in needs(head, plan, plan.communicates) if key not in done]
        path[rank] = missing[0] if missing else partner(head)
        rank = plan.rank_of[path[rank][1]]
    cycle = list(path)[list(path).index(rank) :] if rank in path else list(path)[-1:]
    cells = [(each, position[each]) for each in cycle]
    heads = [plan.actions[each][at] for each, at in cells]
    awaited = [_name(plan, path[each]) for each in cycle]
    if rank not in path:
        sentence = f"rank {cycle[0]}: {heads[0]} waits for {awaited[0]}, which never comes"
    elif len(cycle) == 1:
        sentence = f"rank {rank}, word {position[rank] + 1}: {heads[0]} stands before {awaited[0]}, which it needs"
    else:
        links = (
            f"rank {each} waits at {head} for {key}" for each, head, key in zip(cycle, heads, awaited, strict=True)
        )
        sentence = f"deadlock, a cycle of {len(cycle)} ranks: {', '.join(links)}"
    return ScheduleError(sentence, plan.actions, cells)


def _name(plan: Plan, key: Key) -> str:
    """Return the action that gives this key, as the plan has it."""
    kind, stage, microbatch = key
    row = plan.actions[plan.rank_of[stage]]
    return next((str(action) for action in row if action.key == key), f"{stage}{kind}{microbatch}")
