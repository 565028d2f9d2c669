"""The schedules, each written as what a rank does how many times.

    naive        0F0 ──▶ 1F0 ──▶ 1B0 ──▶ 0B0 ──▶ 0F1 ...         one rank works at a time
    gpipe        F0 F1 F2 F3 ....... B0 B1 B2 B3                 all forward, then all backward
    1f1b         F0 F1 .. B0 F2 B1 F3 B2 .. B3                   a backward as soon as there can be one
    interleaved  the same with several stages a rank             shorter stages, so a shorter bubble

The others split the backward, so that weight gradients fill the bubble:

    B = I + W     I, the gradient of the inputs: the stage before waits for it, so it comes at once.
                  W, the gradients of the weights: nobody waits for them, so they come where a rank
                  would idle.

    zb-h1 does so to 1f1b, and zb1p to interleaved; zb-v and dualpipe-v place their stages in a V.

    V placement, 3 ranks      stage 0  1  2 ╮
                              stage 5  4  3 ╯     the first rank holds the last stage too, and has its gradient at once
                              rank  0  1  2

A schedule is a pure function of sizes. `simulate.py` has the formulas of its cost; p, m and v are
as there. (Qi et al. 2023, "Zero bubble pipeline parallelism". DualPipeV: DeepSeek-AI 2024,
"DeepSeek-V3 technical report", section 3.2.1, folded into a V as in their repository DualPipe.)
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping

from minidist.full.pipeline.actions import Action, Kind, Plan

Row = list[Action]


def row_of(stages: Mapping[str, int], microbatches: int, *parts: tuple[int, str]) -> Row:
    """Return a rank's actions, of which each part says how often, and what: `(3, "F down, I down,
    W")`.

    `F down` is a forward through the stage called `down`. Each kind takes the microbatches of each
    stage in order. `W` is the one that is owed longest; those still owed at the end are appended.
    Microbatches from the number `microbatches` on are left out. That keeps the order of the others,
    so a plan without a deadlock still has none.
    """
    row: Row = []
    owed: deque[Action] = deque()  # the W of each I, oldest first
    taken: Counter[Action] = Counter()  # forwards and backwards of each stage so far
    read: dict[str, Action] = {}  # the first action of each step
    for times, steps in parts:
        for step in steps.split(", ") * times:
            if step == Kind.WEIGHTS:
                row.append(owed.popleft())
                continue
            if step not in read:
                kind, stage = step.split()
                read[step] = Action(Kind(kind), stages[stage])
            first = read[step]
            number = taken[first.key]
            taken[first.key] = number + 1
            row.append(Action(first.kind, first.stage, number))
            if first.kind == Kind.INPUTS:
                owed.append(Action(Kind.WEIGHTS, first.stage, number))
    return [action for action in (*row, *owed) if action.microbatch < microbatches]


def in_turn(
    rank: int,
    ranks: int,
    microbatches: int,
    warm_up: int,
    chunks: int = 1,
    group: int = 1,
    backward: Kind = Kind.BACKWARD,
) -> Row:
    """Return `warm_up` forwards, then one forward and one backward in turn, then the backwards that
    are left.

    Stage c * ranks + rank is the rank's chunk c, and `group` microbatches pass through each chunk in
    turn. If a `backward` is the gradient of the inputs, W follows from number `rank` on.
    """
    turns = [step // group % chunks for step in range(microbatches * chunks)]
    forwards = [f"F {chunk}" for chunk in turns]
    backwards = [f"{backward} {chunks - 1 - chunk}" for chunk in turns]
    if backward == Kind.INPUTS:
        backwards[rank:] = [f"{step}, W" for step in backwards[rank:]]
    warm_up = min(warm_up, len(forwards))
    steps = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        steps += pair
    steps += backwards[len(forwards) - warm_up :]
    stages = {str(chunk): chunk * ranks + rank for chunk in range(chunks)}
    return row_of(stages, microbatches, (1, ", ".join(steps)))


def naive(rank: int, ranks: int, microbatches: int) -> Row:
    """Forward and backward of one microbatch, then of the next.

    Bubble (p-1)/p. A rank holds 1 microbatch.
    """
    return in_turn(rank, ranks, microbatches, warm_up=0)


def gpipe(rank: int, ranks: int, microbatches: int) -> Row:
    """All forwards, then all backwards. (Huang et al. 2019, "GPipe", section 2.3.)

    Bubble (p-1)/(m+p-1). A rank holds all m microbatches. Backward takes them in the order of
    forward; in the paper it takes the last one first. The bubble is the same, and our order sums
    gradients as 1f1b does.
    """
    return in_turn(rank, ranks, microbatches, warm_up=microbatches)


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Row:
    """Warm-up, then one forward and one backward in turn. (Narayanan et al. 2019, "PipeDream",
    section 3.2; with a flush: Narayanan et al. 2021, section 2.2.1.)

    Bubble (p-1)/(m+p-1), as gpipe. Rank r holds at most p - r microbatches.
    """
    return in_turn(rank, ranks, microbatches, warm_up=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """1f1b over `chunks` stages a rank: stage c * p + rank, p microbatches of each in turn.
    (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section
    2.2.2.)

    Bubble (p-1)/(v m+p-1). Rank 0 holds up to p(v + 1) - 1 microbatches of one stage, which is 1/v
    of its layers.

    Raises
    ------
    ValueError
        If `microbatches` is no multiple of `ranks`.
    """
    if microbatches % ranks:
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        fault = (
            f"interleaved takes microbatches in groups of {ranks}, one for each rank, but there "
            f"are {microbatches}"
        )
        raise ValueError(f"{fault}: make it {f'{below} or ' if below else ''}{above}, or use 1f1b")
    if chunks == 1:
        return one_forward_one_backward(rank, ranks, microbatches)
    warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    return in_turn(rank, ranks, microbatches, warm_up, chunks, ranks)


def zb_h1(rank: int, ranks: int, microbatches: int) -> Row:
    """1f1b with W put off by `rank` microbatches: the last ranks have most W left, and most time to
    fill at the end.

    With p microbatches or more, rank r idles (p-1)(F + I - W), if W is the shortest of the three.
    It holds at most p-r microbatches, as in 1f1b, and of r + 1 more what W needs. (Qi et al. 2023,
    section 2.1, figure 3.)
    """
    return in_turn(rank, ranks, microbatches, ranks - rank - 1, backward=Kind.INPUTS)


def zb1p(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """interleaved with W put off by `rank` microbatches, as in zb-h1: with one chunk it is zb-h1.

    A rank waits only for the rank behind it, not for a whole round trip, so neighbouring ranks
    differ by one forward in their warm-up, where interleaved has two. With p microbatches or more
    in each group, rank r idles (p-1)(F + I - W) of a stage, which is 1/v of its layers, if W is the
    shortest of the three. In groups of p it holds at most p v - r microbatches of one stage, and of
    r + 1 more what W needs. (DeepSeek's tables and torch's `ScheduleInterleavedZeroBubble` call it
    ZB1P; Qi et al. 2023, section 2.1, for one chunk.)

    Raises
    ------
    ValueError
        If `microbatches` is no multiple of the number of groups, which is as often as p fits into
        it.
    """
    groups = max(1, microbatches // ranks)
    if microbatches % groups:
        below = microbatches - microbatches % groups
        above = min(below + groups, (groups + 1) * ranks)
        raise ValueError(
            f"zb1p takes microbatches in {groups} equal groups of at least {ranks}, one for each "
            f"rank, but there are {microbatches}: make it {below} or {above}, or use zb-h1"
        )
    group = microbatches // groups
    warm_up = (chunks - 1) * group + ranks - rank - 1
    return in_turn(rank, ranks, microbatches, warm_up, chunks, group, Kind.INPUTS)


def zb_v(rank: int, ranks: int, microbatches: int) -> Row:
    """Two stages a rank in a V: if F, I and W take equal times, no rank waits between its first and
    its last action.

    A rank holds at most 2p microbatches of one stage, which is half of its layers: as much as the
    first rank of 1f1b. The schedule is made for 2p - 1 microbatches or more; for fewer, the others
    are taken out. (Qi et al. 2023, section 6.)
    """
    return row_of(
        {"down": rank, "up": 2 * ranks - 1 - rank},
        microbatches,
        (2 * (ranks - rank) - 1, "F down"),
        (rank, "F up, F down"),
        (ranks - rank, "F up, I up, W"),
        (max(microbatches, 2 * ranks - 1) - ranks, "F down, I down, W, F up, I up, W"),
        (rank, "I down, I up"),
        (ranks - rank, "I down, W"),
    )


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Row:
    """Two stages a rank in a V: the forward of one beside the backward of the other, and W where a
    rank would idle.

    In the paper such a pair runs at the same time: one computes while the other communicates. Here
    the forward comes directly before the backward. A rank holds at most 2p + 1 microbatches of one
    stage, which is half of its layers. The schedule is made for 2p microbatches or more; for fewer,
    the others are taken out. (DeepSeek-AI 2024, section 3.2.1, figure 5 for DualPipe, of which this
    is one half, folded.)
    """
    below = ranks - rank - 1  # how many ranks are nearer to the turn of the V
    last = [f"B {way}" for way in ("up", "down") * (rank + 1)]
    last[rank + 1 :] = [step.replace("B", "I") for step in last[rank + 1 :]]
    return row_of(
        {"down": rank, "up": 2 * ranks - 1 - rank},
        microbatches,
        (2 * below, "F down"),
        (rank + 1, "F down, F up"),
        (below, "I up, W, F up"),
        (max(microbatches - 2 * ranks, 0) + rank + 1, "F down, B up, F up, B down"),
        (below, "B up, F up, B down"),
        (1, ", ".join(last)),
        (below, "W, I down"),
    )


SCHEDULES: dict[str, Callable[[int, int, int], Row]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
V_SHAPED = ("zb-v", "dualpipe-v")
CHUNKED: dict[str, Callable[[int, int, int, int], Row]] = {"interleaved": interleaved, "zb1p": zb1p}
NAMES = (*SCHEDULES, *CHUNKED)


def plan(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """Return the actions of every rank under a schedule, computing only.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    chunks : int
        Stages a rank, for interleaved and zb1p. zb-v and dualpipe-v always have two, one on the way
        down and one on the way up; the others have one.

    Raises
    ------
    ValueError
        For an unknown name, for less than one rank, microbatch or chunk, for chunks that the
        schedule does not have, or for a number of microbatches that it cannot group.
    """
    if name not in NAMES:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what}={value}, but a schedule needs at least 1")
    offered = 2 if name in V_SHAPED else 1
    if name not in CHUNKED and chunks not in (1, offered):
        has = "1 chunk"
        if name in V_SHAPED:
            has = "2 chunks"
        raise ValueError(f"{name} has {has} a rank, not {chunks}: use interleaved")
    down = tuple(range(ranks))
    if name in CHUNKED:
        rows = [CHUNKED[name](rank, ranks, microbatches, chunks) for rank in down]
    else:
        rows = [SCHEDULES[name](rank, ranks, microbatches) for rank in down]
    rank_of = down + down[::-1] if name in V_SHAPED else down * chunks
    return Plan(name, ranks, len(rank_of), microbatches, rank_of, tuple(map(tuple, rows)))
