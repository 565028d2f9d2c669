"""The schedules with whole backwards, and the table of all schedules.

    naive        0F0 ──▶ 1F0 ──▶ 1B0 ──▶ 0B0 ──▶ 0F1 ...         one rank works at a time
    gpipe        F0 F1 F2 F3 ....... B0 B1 B2 B3                 all forward, then all backward
    1f1b         F0 F1 .. B0 F2 B1 F3 B2 .. B3                   a backward as soon as there can be one
    interleaved  the same with several stages a rank             shorter stages, so a shorter bubble

A schedule is a pure function of sizes. `simulate.py` has the formulas of its cost; p, m and v are as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minidist.parallel.pipeline.actions import Action, Kind, Plan
from minidist.parallel.pipeline.zero_bubble import dualpipe_v, zb_h1, zb_v

Row = list[Action]


def forwards(stage: int, microbatches: Iterable[int]) -> Row:
    """Return the forwards of these microbatches through a stage."""
    return [Action(Kind.FORWARD, stage, m) for m in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> Row:
    """Return the backwards of these microbatches through a stage."""
    return [Action(Kind.BACKWARD, stage, m) for m in microbatches]


def naive(rank: int, ranks: int, microbatches: int) -> Row:
    """Forward and backward of one microbatch, then of the next.

    Bubble (p-1)/p. A rank holds 1 microbatch.
    """
    return [action for m in range(microbatches) for action in forwards(rank, [m]) + backwards(rank, [m])]


def gpipe(rank: int, ranks: int, microbatches: int) -> Row:
    """All forwards, then all backwards. (Huang et al. 2019, "GPipe", section 2.3.)

    Bubble (p-1)/(m+p-1). A rank holds all m microbatches. Backward takes them in the order of forward; in the paper it
    takes the last one first. The bubble is the same, and our order sums gradients as 1f1b does.
    """
    return forwards(rank, range(microbatches)) + backwards(rank, range(microbatches))


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Row:
    """Warm-up, then one forward and one backward in turn. (Narayanan et al. 2019, "PipeDream", section 3.2; with a
    flush: Narayanan et al. 2021, section 2.2.1.)

    Bubble (p-1)/(m+p-1), as gpipe. Rank r holds at most p - r microbatches.
    """
    warm_up = min(ranks - rank - 1, microbatches)
    row = forwards(rank, range(warm_up))
    for m in range(warm_up, microbatches):
        row += forwards(rank, [m]) + backwards(rank, [m - warm_up])
    return row + backwards(rank, range(microbatches - warm_up, microbatches))


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    """1f1b over `chunks` stages a rank: stage c * p + rank, p microbatches of each in turn. (Narayanan et al. 2021,
    "Efficient large-scale language model training on GPU clusters", section 2.2.2.)

    Bubble (p-1)/(v m+p-1). Rank 0 holds up to p(v + 1) - 1 microbatches of one stage, which is 1/v of its layers.

    Raises
    ------
    ValueError
        If `microbatches` is no multiple of `ranks`.
    """
    if microbatches % ranks:
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        raise ValueError(
            f"interleaved takes microbatches in groups of {ranks}, one for each rank, but there are {microbatches}: "
            f"make it {f'{below} or ' if below else ''}{above}, or use 1f1b"
        )
    if chunks == 1:
        return one_forward_one_backward(rank, ranks, microbatches)

    def stage_and_microbatch(step: int, forward: bool) -> tuple[int, int]:
        group, place = divmod(step, ranks)
        chunk = group % chunks if forward else chunks - 1 - group % chunks
        return chunk * ranks + rank, group // chunks * ranks + place

    steps = microbatches * chunks
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, steps)
    forwards = [Action(Kind.FORWARD, *stage_and_microbatch(step, True)) for step in range(steps)]
    backwards = [Action(Kind.BACKWARD, *stage_and_microbatch(step, False)) for step in range(steps)]
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return forwards[:warm_up] + [each for pair in pairs for each in pair] + backwards[steps - warm_up :]


SCHEDULES: dict[str, Callable[[int, int, int], Row]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
V_SHAPED = ("zb-v", "dualpipe-v")
NAMES = (*SCHEDULES, "interleaved")


def plan(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Plan:
    """Return the actions of every rank under a schedule, computing only.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    chunks : int
        Stages a rank, for interleaved. zb-v and dualpipe-v always have two, one on the way down and one on the way up;
        the others have one.

    Raises
    ------
    ValueError
        For an unknown name, for less than one rank, microbatch or chunk, for chunks that the schedule does not have, or
        for a number of microbatches that interleaved cannot group.
    """
    if name not in NAMES:
        raise ValueError(f"there is no schedule {name!r}: choose one of {', '.join(NAMES)}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what}={value}, but a schedule needs at least 1")
    offered = 2 if name in V_SHAPED else 1
    if name != "interleaved" and chunks not in (1, offered):
        raise ValueError(
            f"{name} has {offered} chunk{'s' * (offered > 1)} a rank, not {chunks}: use interleaved for more"
        )
    down = tuple(range(ranks))
    if name == "interleaved":
        rows = [interleaved(rank, ranks, microbatches, chunks) for rank in down]
        rank_of = down * chunks
    else:
        rows = [SCHEDULES[name](rank, ranks, microbatches) for rank in down]
        rank_of = down + down[::-1] if name in V_SHAPED else down
    return Plan(name, ranks, len(rank_of), microbatches, rank_of, tuple(map(tuple, rows)))
