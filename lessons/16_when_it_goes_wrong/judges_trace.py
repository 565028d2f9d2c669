"""Lesson 16, task 3: the programs that read a trace, its judge, and the runs that are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from judges import NOTHING

from minidist import Cluster, Communicator, run
from minidist.collectives import all_reduce
from minidist.course.grader.contract import Array, Arrays, Case, Note, expect_close, expect_equal
from minidist.trace import Event, Trace

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
        "waited": np.array([np.nan if event.waited_from is None else event.waited_from for event in events]),
    }


def read_trace(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    rows = zip(*(given[name].tolist() for name in ("rank", "kind", "main", "start", "end", "waited")), strict=True)
    events = [
        Event(rank, KINDS[kind], KINDS[kind], start, end, 0, "main" if main else "+1", "", "", waited_from)
        for rank, kind, main, start, end, waited in rows
        for waited_from in (None if np.isnan(waited) else waited,)
    ]
    seconds = exercise.waiting(list(events))
    slow = exercise.straggler(list(events))
    ranks = sorted(seconds)
    return {"ranks": ranks, "seconds": [float(seconds[r]) for r in ranks], "slow": NOTHING if slow is None else slow}


def judge_trace(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Count the moments one by one."""
    given, result = case.given[0], results[0]
    ranks = sorted(set(given["rank"].tolist()))
    begins = np.where(np.isnan(given["waited"]), given["start"], given["waited"])
    counts = (given["kind"] >= 1) & (given["kind"] <= LAST) & given["main"]
    moments = np.zeros((len(ranks), HORIZON), bool)
    for row, begin, end in zip(given["rank"][counts], begins[counts], given["end"][counts], strict=True):
        moments[ranks.index(row), int(begin) : int(end)] = True
    waited = moments.sum(axis=1).astype(np.float64)
    some = {"ranks that never communicate are left out": sorted(set(given["rank"][counts].tolist()))}
    expect_equal(0, "the list of ranks in the answer", result["ranks"], np.array(ranks), instead=some)
    lengths = given["end"] - begins
    for row, (rank, times) in enumerate(zip(ranks, result["seconds"], strict=True)):
        mine = counts & (given["rank"] == rank)
        every = mine | ((given["rank"] == rank) & (given["kind"] >= 1) & (given["kind"] <= LAST))
        none = np.where(begins == 0, given["start"], begins)
        instead = {
            "waited_from = 0.0 is taken for None": covered(none[mine], given["end"][mine]),
            "moments of events that overlap count twice": lengths[mine].sum(),
            "events of other tracks count as well": covered(begins[every], given["end"][every]),
            "waited_from is not looked at": covered(given["start"][mine], given["end"][mine]),
            "some moments count twice, as behind a short event within a long one": max(waited[row], times),
        }
        expect_close(rank, "waiting", times, waited[row], instead=instead)
    least, most, median = ranks[int(waited.argmin())], ranks[int(waited.argmax())], float(np.median(waited))
    instead = {
        "just half of the median is slow already": least if waited.min() <= median / 2 else NOTHING,
        "a rank is compared with the mean of all": least if waited.min() < waited.mean() / 2 else NOTHING,
        "less than the median is slow already": least if waited.min() < median else NOTHING,
        "some rank always counts as slow": least,
        "the rank that waits most is blamed": most,
    }
    slow = least if waited.min() < median / 2 else NOTHING
    expect_equal(0, "straggler (-1: None)", result["slow"], np.array(slow), instead=instead)


def covered(begins: Array, ends: Array) -> float:
    """Return how many moments lie in one of these intervals at least."""
    moments = np.zeros(HORIZON, bool)
    for begin, end in zip(begins, ends, strict=True):
        moments[int(begin) : int(end)] = True
    return float(moments.sum())


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
    """Rank 0 waits little, but its stream communicates all the time, with messages posted far ahead."""
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
    """Receives that waited from 1.0 on, or for rank 1 from 0.0 on, which is a time like any other."""
    return [Event(rank, "recv", "recv", 3.0, 9.0, waited_from=0.0 if rank == 1 else 1.0) for rank in range(3)]
