"""Lesson 16: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Cluster, Communicator, run
from minidist.collectives import all_reduce
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, expect_equal, sent_by
from minidist.trace import Event, Trace

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication")
NAMES = ("first.weight", "first.bias", "second.weight")
KINDS = ("compute", "send", "recv", "exchange", "collective", "wait", "held")
NOTHING = -1
HORIZON = 400  # the moments that a trace may have
DOING, DOING_LETTERS = ("computes", "waits", "finished"), "CWF"
Finding = tuple[str, list[int]] | None
# What it is: the limit; the looks: the time, and of each rank whether it Computes, has Finished, or waits for whom and
# since when; the finding; and after how many looks.
SCENES: dict[str, tuple[float, tuple[str, ...], Finding, int]] = {
    "three wait in a circle": (
        100,
        ("1: C 2@0.5 3@0.5 C", "2: 2@1.5 2@0.5 3@0.5 1@1.5", "3: 2@1.5 2@0.5 3@0.5 1@1.5"),
        ("deadlock", [1, 2, 3]),
        3,
    ),
    "rank 2 has finished": (100, ("1: 1@0.5 2@0.5 F C", "2: 1@0.5 2@0.5 F C"), ("gone", [0, 1, 2]), 2),
    "rank 2 computes for long": (
        10,
        ("1: 1@0.25 2@0.5 C", "5: 1@0.25 2@0.5 C", "10.25: 1@0.25 2@0.5 C", "10.75: 1@0.25 2@0.5 C"),
        ("slow", [0, 1, 2]),
        4,
    ),
    "a message was on its way": (10, ("1: 1@0.5 0@0.5", "2: 1@1.5 0@1.5", "3: C 0@2.5", "4: F C", "5: F F"), None, 5),
    "rank 0 has waited for long": (
        10,
        ("9: 1@0.25 2@8.5 C", "10: 1@0.25 2@9.5 C", "10.75: 1@0.25 2@10.5 C", "11: F F F"),
        ("slow", [0, 1, 2]),
        3,
    ),
    "who leads to the circle moves": (
        100,
        ("1: 2@0.5 4@0.5 3@0.5 2@0.5 F", "2: 2@1.5 4@0.5 3@0.5 2@0.5 F"),
        ("deadlock", [2, 3]),
        2,
    ),
    "all is well": (10, ("1: C 0@0.5 C", "2: 2@1.5 C C", "3: F F F"), None, 3),
}


def ask_words(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    return {"odd": np.array(exercise.odd_ranks(given["words"].tobytes().decode(), comm), np.int64)}


def judge_words(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every rank names the same odd ones, after one digest from each to each."""
    expected = odd_ones([given["words"].tobytes() for given in case.given])
    for rank, result in enumerate(results):
        expect_ranks(rank, "the odd ranks", result["odd"], expected)
        expect_sent(rank, notes, [8] * (case.ranks - 1))


def odd_ones(answers: Sequence[Any]) -> list[int]:
    """Return which answers are not the most frequent one; of equally frequent ones, the first is right."""
    counts = Counter(answers)
    usual = max(counts, key=lambda answer: (counts[answer], -answers.index(answer)))
    return [rank for rank, answer in enumerate(answers) if answer != usual]


def train(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 after each of four steps; return the first that it found."""
    stored = given["weights"].copy()
    arrays = {name: stored[i].T if i == 2 else stored[i] for i, name in enumerate(NAMES)}  # the last: not contiguous
    found: dict[str, Any] = {"step": NOTHING, "name": NOTHING, "ranks": np.empty(0, np.int64)}
    for step in range(4):
        stored *= 2  # an update that rounds nothing, so what is odd stays odd
        if step == given["when"] and given["mine"]:
            kind = given["kind"].tobytes().decode()
            if kind == "exchange":
                stored[[0, 1]] = stored[[1, 0]]
            for number in range(int(given["where"]), len(NAMES) if kind == "rest" else int(given["where"]) + 1):
                spoil(stored[number], "bit" if kind == "rest" else kind)
        odd = comm.rank % 2  # here the same numbers lie in another order
        answer = exercise.first_difference({n: np.array(a, order="F") if odd else a for n, a in arrays.items()}, comm)
        if answer is not None and found["step"] == NOTHING:
            name, ranks = answer
            found = {"step": step, "name": NAMES.index(name), "ranks": np.array(ranks, np.int64)}
    return found


def spoil(array: np.ndarray[Any, Any], kind: str) -> None:
    """Change an array of 2 x 4 float64, in place."""
    if kind == "bit":
        array.view(np.uint64)[1, 3] ^= np.uint64(1)
    elif kind == "swap":
        array[0, 0], array[0, 1] = array[0, 1], array[0, 0]
    elif kind == "sign":
        array[1, 1] = -array[1, 1]
    elif kind == "nan":
        array[0, 2] = np.nan
    elif kind == "sum":
        array[0, 0] += 1
        array[1, 0] -= 1


def judge_training(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The step, the array and the ranks; and details are sent only from then on."""
    given = case.given[0]
    hit = [rank for rank, mine in enumerate(g["mine"] for g in case.given) if mine]
    bits = {rank: 1 if rank in hit else 0 for rank in range(case.ranks)}
    harmless = given["kind"].tobytes() == b"nothing" or len(hit) == case.ranks
    step = NOTHING if harmless else int(given["when"])
    for rank, result in enumerate(results):
        expect_equal(rank, "the step (-1: none) of the first difference", result["step"], np.array(step))
        if not harmless:
            name = NAMES[int(result["name"])]
            if name != NAMES[int(given["where"])]:
                several = given["kind"].tobytes() in (b"rest", b"exchange")
                why = ", the first of several that differ" if several else ""
                raise Wrong(f"rank {rank}: found {name}, expected {NAMES[int(given['where'])]}{why}")
            expect_ranks(rank, f"the ranks where {name} is odd", result["ranks"], odd_ones(list(bits.values())))
        odd_steps, others = 0 if harmless else 4 - step, case.ranks - 1
        details = [8] * others + [8 * len(NAMES)] * others
        expect_sent(rank, notes, [8] * others * (4 - odd_steps) + details * odd_steps)


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
    counts = (given["kind"] >= 1) & (given["kind"] <= 5) & given["main"]
    moments = np.zeros((len(ranks), HORIZON), bool)
    for row, begin, end in zip(given["rank"][counts], begins[counts], given["end"][counts], strict=True):
        moments[ranks.index(row), int(begin) : int(end)] = True
    waited = moments.sum(axis=1).astype(np.float64)
    expect_equal(0, "the list of ranks in the answer", result["ranks"], np.array(ranks))
    lengths = given["end"] - begins
    for row, rank in enumerate(ranks):
        mine = counts & (given["rank"] == rank)
        every = mine | ((given["rank"] == rank) & (given["kind"] >= 1) & (given["kind"] <= 5))
        none = np.where(begins == 0, given["start"], begins)
        instead = {
            "moments of events that overlap count twice": lengths[mine].sum(),
            "events of other tracks count as well": covered(begins[every], given["end"][every]),
            "waited_from is not looked at": covered(given["start"][mine], given["end"][mine]),
            "waited_from = 0.0 is taken for None": covered(none[mine], given["end"][mine]),
        }
        expect_close(rank, "waiting", result["seconds"][row], waited[row], instead=instead)
    slow = ranks[int(np.argmin(waited))] if waited.min() < np.median(waited) / 2 else NOTHING
    expect_equal(0, "straggler (-1: None)", result["slow"], np.array(slow))


def covered(begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> float:
    """Return how many moments lie in one of these intervals at least."""
    moments = np.zeros(HORIZON, bool)
    for begin, end in zip(begins, ends, strict=True):
        moments[int(begin) : int(end)] = True
    return float(moments.sum())


def ask_memory(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    held = [dict(zip(CATEGORIES, row, strict=True)) for row in given["held"].tolist()]
    answer = exercise.out_of_memory([(float(second), sample) for second, sample in enumerate(held)], 100, comm)
    if answer is None:
        return {"rank": NOTHING, "category": NOTHING}
    rank, category = answer
    return {"rank": rank, "category": CATEGORIES.index(category)}


def judge_memory(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare peaks, which are moments, not sums of what was held at different ones."""
    peaks = np.array([given["held"][given["held"].sum(axis=1).argmax()] for given in case.given])
    worst = int(peaks.sum(axis=1).argmax())
    excess = peaks[worst] - np.median(peaks, axis=0)
    expected = (worst, int(excess.argmax())) if peaks[worst].sum() > 100 else (NOTHING, NOTHING)
    for rank, result in enumerate(results):
        found = int(result["rank"]), int(result["category"])
        if found != expected:
            says = f"rank {rank}: out of memory is {named(*found)}, expected {named(*expected)}"
            for clause, answer in other_blame(case.given).items():
                if found == answer:
                    raise Wrong(f"{says}: this is what comes out if {clause}")
            raise Wrong(says)
        expect_sent(rank, notes, [40] * (case.ranks - 1))


def other_blame(given: Sequence[Arrays]) -> dict[str, tuple[int, int]]:
    """Return what known mistakes find."""
    held = [each["held"] for each in given]
    firsts = np.array([samples[samples.sum(axis=1).argmax()] for samples in held])
    lasts = np.array([samples[len(samples) - 1 - samples.sum(axis=1)[::-1].argmax()] for samples in held])
    never, totals = np.array([samples.max(axis=0) for samples in held]), firsts.sum(axis=1)
    worst, over = int(totals.argmax()), np.flatnonzero(totals > 100)
    first = int(over[0]) if len(over) else worst
    median, others = np.median(firsts, axis=0), np.median(np.delete(firsts, worst, axis=0), axis=0)
    most = int(never.sum(axis=1).argmax())
    return {
        "what is just the capacity counts as above it": (worst, int((firsts[worst] - median).argmax())),
        "the first rank above the capacity is taken": (first, int((firsts[first] - median).argmax())),
        "the largest category is to blame": (worst, int(firsts[worst].argmax())),
        "the rank is compared with the mean": (worst, int((firsts[worst] - firsts.mean(axis=0)).argmax())),
        "the rank itself is left out of the median": (worst, int((firsts[worst] - others).argmax())),
        "of equal peaks the last sample is taken": (worst, int((lasts[worst] - np.median(lasts, axis=0)).argmax())),
        "the largest values of different moments are added up": (
            most,
            int((never[most] - np.median(never, axis=0)).argmax()),
        ),
    }


def named(rank: int, category: int) -> str:
    """Say which rank and category."""
    return "None" if rank == NOTHING else f"rank {rank} by its {CATEGORIES[category]}"


class NothingLeft(Exception):
    """A scene is over, but is looked at again."""


def look_on(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5, counting looks and pauses."""
    counted = {"looks": 0, "pauses": 0}

    def look() -> tuple[float, list[tuple[str, int, float]]]:
        number = counted["looks"]
        if number == len(given["now"]):
            raise NothingLeft
        counted["looks"] += 1
        columns = (given[name][number].tolist() for name in ("doing", "peer", "since"))
        states = [(DOING[doing], peer, since) for doing, peer, since in zip(*columns, strict=True)]
        return float(given["now"][number]), states

    def pause() -> None:
        counted["pauses"] += 1

    try:
        answer = exercise.watch(look, pause, float(given["limit"]))
    except NothingLeft:
        answer = "on and on", []
    kind, ranks = ("nothing", []) if answer is None else answer
    return {**counted, "kind": letters(str(kind)), "ranks": np.array(ranks, np.int64)}


def judge_scene(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The finding that the scene was written for, at the right look."""
    _, _, finding, looks = SCENES[case.label]
    expect_finding(results[0], finding, looks)


def expect_finding(result: Arrays, finding: Finding, looks: int) -> None:
    """Raise `Wrong` unless this was found, after so many looks, with a pause between each two."""
    kind = result["kind"].tobytes().decode()
    found = None if kind == "nothing" else (kind, result["ranks"].tolist())
    if kind == "on and on":
        raise Wrong(f"watch went on after look {int(result['looks'])}, expected {finding} at look {looks}")
    if found != finding:
        raise Wrong(f"watch found {found} at look {int(result['looks'])}, expected {finding} at look {looks}")
    if int(result["looks"]) != looks:
        raise Wrong(f"watch found {found} at look {int(result['looks'])}, expected that at look {looks}")
    expect_equal(0, "the number of pauses", result["pauses"], np.array(looks - 1))


def letters(text: str) -> np.ndarray[Any, Any]:
    """Return a text as an array."""
    return np.frombuffer(text.encode(), np.uint8)


def expect_ranks(rank: int, name: str, found: np.ndarray[Any, Any], expected: Sequence[int]) -> None:
    """Raise `Wrong` unless just these ranks were named."""
    if found.tolist() != list(expected):
        raise Wrong(f"rank {rank}: {name} are {found.tolist()}, expected {list(expected)}")


def expect_sent(rank: int, notes: Sequence[Note], sizes: Sequence[int]) -> None:
    """Raise `Wrong` unless a rank sent messages of just these sizes, in this order."""
    found = [note.bytes for note in sent_by(rank, notes)]
    if found != list(sizes):
        raise Wrong(f"rank {rank} sent messages of {found} bytes, expected {list(sizes)}")


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


def nobody_waits(rng: np.random.Generator) -> list[Event]:
    """Four ranks that only compute: none waits less than half as long as the others."""
    return [Event(rank, "compute", "forward", 0.0, 50.0) for rank in range(4)]


def from_the_beginning(rng: np.random.Generator) -> list[Event]:
    """Receives that waited from 1.0 on, or for rank 1 from 0.0 on, which is a time like any other."""
    return [Event(rank, "recv", "recv", 3.0, 9.0, waited_from=0.0 if rank == 1 else 1.0) for rank in range(3)]


def scene_case(label: str, limit: float, looks: Sequence[str]) -> Case:
    """Return a scene as numbers."""
    states = [[state.partition("@") for state in look.split()[1:]] for look in looks]
    given = {
        "limit": np.array(limit),
        "now": np.array([float(look.partition(":")[0]) for look in looks]),
        "doing": np.array([[1 if at else DOING_LETTERS.index(who) for who, at, _ in row] for row in states]),
        "peer": np.array([[int(who) if at else -1 for who, at, _ in row] for row in states]),
        "since": np.array([[float(since or 0) for _, _, since in row] for row in states]),
    }
    return Case((given,), label)
