"""A pass over a plan: weights of a stage that waits go to host memory, and come back before they
are used.

    rank 0    0F0 0F1 │ 0OFF0 │ 4F0 4F1 8F0 │ 0FETCH0 │ 8F1 0F2 ...

    computing  │ 0F0 │ 0F1 │ 4F0 │ 4F1 │ 8F0 │ 8F1 │ 0F2 │
    host's port            ├ 0OFF0 ┤     ├ 0FETCH0 ┤            no action waits for a copy

A rank with several stages computes with one of them at a time, and for the others its memory keeps
weights, which nobody reads: all the way through warm-up, for example, those of the later chunks. A
*pause* of a stage lies between two of its actions, before its first or after its last one. If a
pause has room for both copies, the stage leaves in it.

- The port to the host makes one copy after the other, in the order of the rank's list, beside
  computing. Weights do not change within a step, so only the first `OFF` of a stage copies: a later
  one frees memory, at once.
- `OFF` stands directly behind the last use, and `FETCH` as late as it can, so that every action
  still begins when it did. The step takes exactly as long as without.
- When the step begins, and when it ends, all weights are on the device: the optimizer needs them.

(A stage's gradients stay. Ren et al. 2021, "ZeRO-Offload", and Rajbhandari et al. 2021,
"ZeRO-Infinity", section 5.1, move weights layer by layer; here the plan says when.)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minidist.full.pipeline.actions import Action, Kind, Plan
from minidist.full.pipeline.simulate import Cost, Timeline, simulate, times_of


class Pause(NamedTuple):
    """A time in which a rank does not compute with one of its stages.

    It begins when the rank has done `first` of its actions, and ends before the one at position
    `last`. `until` is the time at which the weights have to be back.
    """

    stage: int
    first: int
    last: int
    until: float


class Absence(NamedTuple):
    """A pause in which the weights are away: they leave at its beginning, and are fetched when the
    rank has done `fetched` actions.
    """

    pause: Pause
    fetched: int


def with_offload(
    plan: Plan,
    transfer: Cost,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    input: Cost = 1.0,
    weight: Cost = 1.0,
    latency: float = 0.0,
) -> Plan:
    """Return the plan with `OFF` and `FETCH` for the weights of stages that wait for long enough.

    Call it before `with_communication`. If no pause has room for two copies, the plan comes back as
    it was.

    Parameters
    ----------
    plan : Plan
        It names only what is computed.
    transfer : float, or sequence of float
        The time of a copy of a stage's weights, to the host or back: their bytes divided by the
        bandwidth of the link, in the unit of the other costs. One for all stages, or one for each.
    forward, backward, input, weight, latency
        As for `simulate`.

    Raises
    ------
    ScheduleError
        If the plan gets stuck.
    ValueError
        If a cost is no time; if the plan has messages, reductions or such actions already; or if no
        rank has several stages.

    Cost: for each pause a walk over the rank's other ones.
    """
    if plan.communicates or plan.reduces or plan.offloads:
        raise ValueError(
            f"the plan {plan.name} has more than what is computed: weights leave in a plan to which "
            "nothing was added yet, so call with_offload before with_communication"
        )
    if plan.stages == len(set(plan.rank_of)):
        raise ValueError(
            f"no rank of the plan {plan.name} has several stages, so there is none that waits "
            "while its rank computes with another: use interleaved, zb1p, zb-v or dualpipe-v"
        )
    copies = times_of("transfer", transfer, plan.stages)
    timeline = simulate(plan, forward, backward, input, weight, latency)
    rows = []
    for rank in range(plan.ranks):
        rows.append(_with_absences(timeline, rank, _absences(timeline, rank, copies)))
    return replace(plan, actions=tuple(rows))


def _pauses(timeline: Timeline, rank: int) -> list[Pause]:
    """Return the pauses of a rank's stages, the longest first."""
    row = timeline.plan.actions[rank]
    found = []
    for stage in timeline.plan.stages_of(rank):
        used = [at for at, action in enumerate(row) if action.stage == stage]
        for before, after in zip([-1, *used], [*used, len(row)], strict=True):
            if after > before + 1:
                until = timeline.end[rank][-1] if after == len(row) else timeline.start[rank][after]
                found.append(Pause(stage, before + 1, after, until))
    moments = _moments(timeline, rank)
    return sorted(found, key=lambda pause: moments[pause.first] - pause.until)


def _moments(timeline: Timeline, rank: int) -> Sequence[float]:
    """Return when a rank has done 0, 1, 2, ... of its actions."""
    return (0.0, *timeline.end[rank])


def _absences(timeline: Timeline, rank: int, copies: Sequence[float]) -> list[Absence]:
    """Return the pauses in which weights leave, chosen so that no copy is waited for."""
    moments = _moments(timeline, rank)
    chosen: list[Absence] = []
    if len(timeline.plan.stages_of(rank)) == 1:
        return chosen
    for pause in _pauses(timeline, rank):
        copy = copies[pause.stage]
        for fetched in range(pause.last, pause.first, -1):
            if moments[fetched] - moments[pause.first] < copy:
                break  # it would be fetched before it has left
            if moments[fetched] + copy > pause.until:
                continue  # it would come too late
            tried = [*chosen, Absence(pause, fetched)]
            if _in_time(tried, moments, copies):
                chosen = tried
                break
    return chosen


def _copies(absences: Sequence[Absence]) -> list[tuple[int, bool, Pause]]:
    """Return the copies in the order of a rank's list: after how many of its actions, whether it is
    an `OFF`, and of which pause.

    Of those at one place the fetches come first, and the most urgent one before the others.
    """
    found = []
    for pause, fetched in absences:
        found += [(pause.first, True, pause), (fetched, False, pause)]
    return sorted(found, key=lambda each: (each[0], each[1], each[2].until))


def _in_time(
    absences: Sequence[Absence], moments: Sequence[float], copies: Sequence[float]
) -> bool:
    """Tell whether all weights are back when they are needed, if the port makes one copy after the
    other; and whether each has left before it is fetched.
    """
    port = 0.0
    left: dict[int, float] = {}  # when the last `OFF` of a stage was done
    for place, leaves, pause in _copies(absences):
        begin = max(port, moments[place])
        if leaves:
            port = begin if pause.stage in left else begin + copies[pause.stage]
            left[pause.stage] = port
            continue
        port = begin + copies[pause.stage]
        if begin <= left[pause.stage] or port > pause.until:
            return False
    return True


def _with_absences(
    timeline: Timeline, rank: int, absences: Sequence[Absence]
) -> tuple[Action, ...]:
    """Return a rank's actions with its `OFF` and `FETCH` among them."""
    row = timeline.plan.actions[rank]
    added: list[Action] = []
    done = 0
    times = dict.fromkeys(timeline.plan.stages_of(rank), 0)  # that a stage has come back
    for place, leaves, pause in _copies(absences):
        added += row[done:place]
        done = place
        kind = Kind.OFFLOAD if leaves else Kind.FETCH
        added.append(Action(kind, pause.stage, times[pause.stage]))
        times[pause.stage] += not leaves
    return *added, *row[done:]
