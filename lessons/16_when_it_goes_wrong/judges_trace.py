"""Lesson 16, task 3: the programs that read a trace, its judge, and the runs that are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from judges import NOTHING

from minidist import Cluster, Communicator, run
from minidist.course.grader.contract import Array, Arrays, Case, Note, expect_close, expect_equal
from minidist.full.collectives import all_reduce
from minidist.full.trace import Event, Trace

KINDS = ("compute", "send", "recv", "collective", "wait", "held")
LAST = KINDS.index("wait")  # of the kinds that communicate
HORIZON = 400  # the moments that a trace may have


def as_arrays(events: Sequence[Event]) -> Arrays:
    """Return events as numbers."""
    return {
        "rank": np.array([event.rank for event in events]),
        "kind": np.array([KINDS.index(event.kind) for event in events]),
        "main": np.array([event.track == "main" for event in events]),
        "start": np.array([event.start for event in events]),
        "end": np.array([event.end for event in events]),
        "waited": np.array(
            [np.nan if event.waited_from is None else event.waited_from for event in events]
        ),
    }


def read_trace(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    rows = zip(
        *(given[name].tolist() for name in ("rank", "kind", "main", "start", "end", "waited")),
        strict=True,
    )
    events = [
        Event(
            rank,
            KINDS[kind],
            KINDS[kind],
            start,
            end,
            0,
            "main" if main else "+1",
            "",
            "",
            waited_from,
        )
        for rank, kind, main, start, end, waited in rows
        for waited_from in (None if np.isnan(waited) else waited,)
    ]
    seconds = exercise.waiting(list(events))
    slow = exercise.straggler(list(events))
    ranks = sorted(seconds)
    return {
        "ranks": ranks,
        "seconds": [float(seconds[r]) for r in ranks],
        "slow": NOTHING if slow is None else slow,
    }


def judge_trace(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Count the moments one by one."""
    given, result = case.given[0], results[0]
    ranks = sorted(set(given["rank"].tolist()))
    begins = np.where(np.isnan(given["waited"]), given["start"], given["waited"])
    counts = (given["kind"] >= 1) & (given["kind"] <= LAST) & given["main"]
    moments = np.zeros((len(ranks), HORIZON), bool)
    for row, begin, end in zip(
        given["rank"][counts], begins[counts], given["end"][counts], strict=True
    ):
        moments[ranks.index(row), int(begin) : int(end)] = True
    waited = moments.sum(axis=1).astype(np.float64)
    some = {
        "ranks that never communicate are left out": sorted(set(given["rank"][counts].tolist()))
    }
    expect_equal(
        0, "the list of ranks in the answer", result["ranks"], np.array(ranks), instead=some
    )
    lengths = given["end"] - begins
    for row, (rank, times) in enumerate(zip(ranks, result["seconds"], strict=True)):
        mine = counts & (given["rank"] == rank)
        every = mine | ((given["rank"] == rank) & (given["kind"] >= 1) & (given["kind"] <= LAST))
        none = np.where(begins == 0, given["start"], begins)
        here = given["main"] & (given["rank"] == rank)

        def without(*kinds: str, here: Array = here) -> float:
            some = here & np.isin(
                given["kind"],
                [KINDS.index(kind) for kind in KINDS[1 : LAST + 1] if kind not in kinds],
            )
            return covered(begins[some], given["end"][some])

        kinds = {
            f"events of the kind {kind} are left out": without(kind) for kind in KINDS[1 : LAST + 1]
        }
        kinds |= {
            f"only events of the kind {kind} count": without(
                *(k for k in KINDS[1 : LAST + 1] if k != kind)
            )
            for kind in KINDS[1 : LAST + 1]
        }
        kinds["collectives, which span their messages, and waits are left out"] = without(
            "collective", "wait"
        )
        kinds["only collectives and waits count"] = without("send", "recv")
        pairs = list(zip(begins[mine].tolist(), given["end"][mine].tolist(), strict=True))
        instead = {
            "waited_from = 0.0 is taken for None": covered(none[mine], given["end"][mine]),
            "moments of events that overlap count twice": lengths[mine].sum(),
            "events of other tracks count as well": covered(begins[every], given["end"][every]),
            "waited_from is not looked at": covered(given["start"][mine], given["end"][mine]),
            "events of all kinds count, also computing": covered(begins[here], given["end"][here]),
            **kinds,
            "it is the time from the first beginning to the last end, with what lies between": (
                max(end for _, end in pairs) - min(begin for begin, _ in pairs) if pairs else 0.0
            ),
            "events are not sorted by their beginning before they are joined": joined(pairs),
            "events are sorted by their end, not by their beginning": joined(
                sorted(pairs, key=lambda pair: pair[1])
            ),
            "where the joined events end goes back, behind a short event within a long one": joined(
                sorted(pairs), True
            ),
            "only the longest event counts": max(
                [end - begin for begin, end in pairs], default=0.0
            ),
            "some moments count twice, as behind a short event within a long one": max(
                waited[row], times
            ),
        }
        expect_close(rank, "waiting", times, waited[row], instead=instead)
    least, most, median = (
        ranks[int(waited.argmin())],
        ranks[int(waited.argmax())],
        float(np.median(waited)),
    )
    seconds, low = np.sort(waited), float(waited.min())
    rest = np.delete(waited, waited.argmin())
    equal = [rank for rank, each in zip(ranks, waited.tolist(), strict=True) if each == low]
    limits = {
        "it is compared with half of the median of the other ranks": float(np.median(rest))
        if len(rest)
        else 0.0,
        "it is compared with half of the largest": float(waited.max()),
        "of an even number of ranks the lower one of the middle two is taken for the median": seconds[
            (len(seconds) - 1) // 2
        ],
        "of an even number of ranks the upper one of the middle two is taken for the median": seconds[
            len(seconds) // 2
        ],
        "less than the median is slow already": 2 * median,
        "a rank is compared with the mean of all": float(waited.mean()),
        "it is compared with twice the median": 4 * median,
        "it is compared with a quarter of the median": median / 2,
    }
    instead = {
        "of several that wait least the last is taken": equal[-1] if low < median / 2 else NOTHING,
        "just half of the median is slow already": least if waited.min() <= median / 2 else NOTHING,
        "some rank always counts as slow": least,
        "the rank that waits most is blamed": most,
        "its place in the dictionary is returned, not its rank": int(waited.argmin())
        if waited.min() < median / 2
        else NOTHING,
        **{clause: least if low < limit / 2 else NOTHING for clause, limit in limits.items()},
        "the candidate is the rank that waits most, or nobody is ever slow": NOTHING,
    }
    slow = least if waited.min() < median / 2 else NOTHING
    by_most = "the slow rank is taken to be the one that waits most"
    instead[by_most] = most if waited.max() > 2 * median else NOTHING
    by_limit = sorted(limits, key=limits.__getitem__)  # the strictest that is wrong here says most
    ways = {clause: np.array(instead[clause]) for clause in (*by_limit, *instead)}
    expect_equal(0, "straggler (-1: None)", result["slow"], np.array(slow), instead=ways)


def covered(begins: Array, ends: Array) -> float:
    """Return how many moments lie in one of these intervals at least."""
    moments = np.zeros(HORIZON, bool)
    for begin, end in zip(begins, ends, strict=True):
        moments[int(begin) : int(end)] = True
    return float(moments.sum())


def joined(pairs: Sequence[tuple[float, float]], back: bool = False) -> float:
    """Return how long events last if they are joined in this order; `back`: where they end may go
    back.
    """
    total, reached = 0.0, float("-inf")
    for begin, end in pairs:
        total += max(0.0, end - max(begin, reached))
        reached = end if back else max(reached, end)
    return total


def waits(*seconds: float) -> Callable[[np.random.Generator], list[Event]]:
    """Let each rank wait for so long."""
    return lambda rng: [
        Event(rank, "recv", "recv", 0.0, float(each)) for rank, each in enumerate(seconds)
    ]


def real_run(slow: int | None, ranks: int = 4) -> Callable[[np.random.Generator], list[Event]]:
    """Trace three steps on a modelled cluster, with a slow rank; nobody noted what it was doing."""

    def make(rng: np.random.Generator) -> list[Event]:
        trace = Trace()

        def program(comm: Communicator) -> None:
            for _ in range(3):
                comm.advance(30.0 if comm.rank == slow else 10.0)
                all_reduce(np.ones(comm.size, np.uint8), comm, algorithm="ring")

        run(program, ranks, cluster=Cluster.uniform(1.0, 1.0), trace=trace)
        return trace.events

    return make


def beside(rng: np.random.Generator) -> list[Event]:
    """Rank 0 waits little, but its stream communicates all the time, with messages posted far
    ahead.
    """
    events = []
    for rank in range(4):
        events.append(Event(rank, "compute", "forward", 0.0, 20.0))
        events.append(Event(rank, "held", "bytes held", 5.0, 5.0, 100))
        events.append(Event(rank, "collective", "all_reduce", 0.0, 90.0, track="+1"))
        waited = 80.0 if rank == 0 else float(rng.integers(20, 40))
        events.append(Event(rank, "recv", "recv from 1", 2.0, 90.0, waited_from=waited))
        events.append(Event(rank, "send", "send to 1", 85.0, 88.0))
    return events


def just_below(rng: np.random.Generator) -> list[Event]:
    """Rank 2 waits less than half of the median, and more than half of the mean."""
    return [Event(rank, "recv", "recv", 0.0, 32.0 if rank == 2 else 70.0) for rank in range(4)]


def nobody_waits(rng: np.random.Generator) -> list[Event]:
    """Four ranks that only compute: none waits less than half as long as the others."""
    return [Event(rank, "compute", "forward", 0.0, 50.0) for rank in range(4)]


def from_the_beginning(rng: np.random.Generator) -> list[Event]:
    """Receives that waited from 1.0 on, or for rank 1 from 0.0 on, which is a time like any
    other.
    """
    return [
        Event(rank, "recv", "recv", 3.0, 9.0, waited_from=0.0 if rank == 1 else 1.0)
        for rank in range(3)
    ]
