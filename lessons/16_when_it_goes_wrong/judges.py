"""Lesson 16: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Cluster, Communicator, run
from minidist.collectives import all_reduce
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, expect_equal, known, sent_by
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
    "a clock of whole seconds": (10, ("1: 1@1 0@1", "1.5: 1@1 C", "1.75: 1@1 0@1", "3: F F"), None, 4),
    "all is well": (10, ("1: C 0@0.5 C", "2: 2@1.5 C C", "3: F F F"), None, 3),
}


def ask_words(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    return {"odd": np.array(exercise.odd_ranks(given["words"].tobytes().decode(), comm), np.int64)}


def judge_words(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every rank names the same odd ones, after one digest from each to each."""
    texts = [given["words"].tobytes() for given in case.given]
    instead = {clause: odd_ones([str(digest(text)) for text in texts]) for clause, digest in DIGESTS.items()}
    instead["what rank 0 has counts as right, not what most have"] = odd_ones(texts, texts[0])
    last = max(reversed(texts), key=texts.count)
    instead["of equally many another text than that of the lowest rank counts as right"] = odd_ones(texts, last)
    for rank, result in enumerate(results):
        expect_ranks(rank, "the odd ranks", result["odd"], odd_ones(texts), instead)
        expect_sent(rank, notes, [8] * (case.ranks - 1))


DIGESTS: dict[str, Callable[[bytes], object]] = {
    "the digest does not depend on the letters' order, as their sum does not": sorted,
    "the digest is the length": len,
    "the digest is of the first letters alone": lambda text: text[:8],
}


def odd_ones(answers: Sequence[Any], right: Any = None) -> list[int]:
    """Return which answers are not the `right` one: the most frequent one, of equally frequent ones the first."""
    counts = Counter(answers)
    right = right or max(counts, key=lambda answer: (counts[answer], -answers.index(answer)))
    return [rank for rank, answer in enumerate(answers) if answer != right]


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


def spoil(array: Array, kind: str) -> None:
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
        if (found := int(result["step"])) != step:
            says = [f"at step {number}" if number != NOTHING else "nowhere" for number in (found, step)]
            missed = found == NOTHING or found > step != NOTHING
            why = MISSED[given["kind"].tobytes().decode()] if missed else IMAGINED
            raise Wrong(f"rank {rank}: the first difference is found {says[0]}, expected {says[1]}: {why}")
        if not harmless:
            name = NAMES[int(result["name"])]
            if name != NAMES[int(given["where"])]:
                several = given["kind"].tobytes() in (b"rest", b"exchange")
                why = ", the first of several that differ" if several else ""
                raise Wrong(f"rank {rank}: found {name}, expected {NAMES[int(given['where'])]}{why}")
            expect_ranks(rank, f"the ranks where {name} is odd", result["ranks"], odd_ones(list(bits.values())), {})
        odd_steps, others, all_of_them = 0 if harmless else 4 - step, case.ranks - 1, 8 * len(NAMES)
        one, good, where = [8] * others, [8] * others * (4 - odd_steps), int(given["where"])
        instead = {
            "the digests of all arrays are sent also while all is well": [all_of_them] * others * 4,
            "the digests of all arrays are sent besides while all is well": (one + [all_of_them] * others) * 4,
            "each array has messages of its own": good + one * (1 + len(NAMES)) * odd_steps,
            "each array, up to the first odd one, has messages of its own": good + one * (2 + where) * odd_steps,
        }
        expect_sent(rank, notes, good + (one + [all_of_them] * others) * odd_steps, instead)


MISSED = {  # what is overlooked, by what was done
    "bit": "one bit of one number is another, which the digest has to see: it is of all bits, not of what is printed",
    "rest": "one bit of one number is another, which the digest has to see: it is of all bits, not of what is printed",
    "swap": "two numbers have changed places, which the digest has to see",
    "sum": "two numbers have changed, though not their sum, which the digest has to see",
    "exchange": "two arrays have changed places, which the digest of everything has to see",
    "sign": "0.0 has become -0.0, of which a bit is another",
}
IMAGINED = "all bits are the same there, also of what is no number; arrays only lie in memory in another order"


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
    some = {"ranks that never communicate are left out": sorted(set(given["rank"][counts].tolist()))}
    expect_equal(0, "the list of ranks in the answer", result["ranks"], np.array(ranks), instead=some)
    lengths = given["end"] - begins
    for row, (rank, times) in enumerate(zip(ranks, result["seconds"], strict=True)):
        mine = counts & (given["rank"] == rank)
        every = mine | ((given["rank"] == rank) & (given["kind"] >= 1) & (given["kind"] <= 5))
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
    held = [given["held"] for given in case.given]
    instead = {
        "what is just the capacity counts as above it": blamed(held, capacity=99),
        "the first rank above the capacity is taken": blamed(held, first=True),
        "the largest category is to blame": blamed(held, usual=lambda peaks, worst: 0),
        "the rank is compared with the mean": blamed(held, usual=lambda peaks, worst: peaks.mean(axis=0)),
        "the rank itself is left out of the median": blamed(
            held, usual=lambda peaks, worst: np.median(np.delete(peaks, worst, axis=0), axis=0)
        ),
        "of equal peaks the last sample is taken": blamed([samples[::-1] for samples in held]),
        "the largest values of different moments are added up": blamed([each.max(axis=0)[None] for each in held]),
    }
    expected = blamed(held)
    for rank, result in enumerate(results):
        found = int(result["rank"]), int(result["category"])
        if found != expected:
            why = " or if ".join(clause for clause, answer in instead.items() if answer == found)
            says = f"rank {rank}: out of memory is {named(*found)}, expected {named(*expected)}"
            raise Wrong(f"{says}: this is what comes out if {why}" if why else says)
        expect_sent(rank, notes, [40] * (case.ranks - 1))


def blamed(
    held: Sequence[Array],
    usual: Callable[[Array, int], Any] = lambda peaks, worst: np.median(peaks, axis=0),
    first: bool = False,
    capacity: int = 100,
) -> tuple[int, int]:
    """Return the rank and the category to blame; other arguments than `held` are what goes wrong."""
    peaks = np.array([samples[samples.sum(axis=1).argmax()] for samples in held])
    totals = peaks.sum(axis=1)
    if totals.max() <= capacity:
        return NOTHING, NOTHING
    worst = int((totals > capacity).argmax() if first else totals.argmax())
    return worst, int((peaks[worst] - usual(peaks, worst)).argmax())


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
    expect_finding(case.given[0], results[0], finding, looks)


def expect_finding(given: Arrays, result: Arrays, finding: Finding, looks: int) -> None:
    """Raise `Wrong` unless this was found, after so many looks, with a pause between each two."""
    kind, ranks, when = result["kind"].tobytes().decode(), result["ranks"].tolist(), int(result["looks"])
    found = None if kind == "nothing" else (kind, ranks)
    if found != finding or when != looks:
        says = "watch went on after" if kind == "on and on" else f"watch found {found} at"
        expected = "that" if found == finding else finding
        why = unfounded(given, kind, ranks, when) or overlooked(finding, kind, ranks, looks < when)
        raise Wrong(f"{says} look {when}, expected {expected} at look {looks}{why}")
    expect_equal(0, "the number of pauses", result["pauses"], np.array(looks - 1))


def unfounded(given: Arrays, kind: str, ranks: Sequence[int], when: int) -> str:
    """Return why what was found at look number `when` does not count, in words behind the rejection, or nothing."""
    doing, since = given["doing"], given["since"]
    waits = [rank for rank in ranks if doing[when - 1][rank] == 1]
    if kind == "nothing" and (doing[when - 1] == 0).any():
        return ": some ranks still compute, and may wait later: it is over when all have finished"
    if kind == "slow" and not given["now"][when - 1] - since[when - 1][ranks[0]] > given["limit"]:
        return f": rank {ranks[0]}, where the chain begins, has not waited for more than the limit"
    if kind not in ("deadlock", "gone"):
        return ""
    if when == 1:
        return ": one look proves nothing, a message may be on its way"
    moved = [
        rank
        for rank in waits
        for name in ("doing", "peer")
        if given[name][when - 1][rank] != given[name][when - 2][rank]
    ]
    if moved:
        return f": rank {moved[0]} did something else at the look before"
    again = [rank for rank in waits if since[when - 1][rank] != since[when - 2][rank]]
    return f": at the look before, rank {again[0]} was in another wait, which has ended" if again else ""


def overlooked(finding: Finding, kind: str, ranks: Sequence[int], late: bool) -> str:
    """Return why `finding` is one, or in which form, if something else was found, or nothing, or the same too late."""
    if finding is None:
        return ""
    if kind == finding[0] == "deadlock" and {*ranks} > {*finding[1]}:
        return ": ranks that lead to the circle are not in it"
    if kind == finding[0] == "deadlock" and {*ranks} == {*finding[1]} and not late:
        return ": the circle begins with its lowest rank"
    return {
        "deadlock": ": the ranks in the circle wait as at the look before; those that lead to it need not",
        "gone": ": the ranks in the chain that wait do so as at the look before; the finished one need not",
        "slow": ": the rank where the chain begins has waited for more than the limit, whoever it waits for",
    }[finding[0]]


def letters(text: str) -> Array:
    """Return a text as an array."""
    return np.frombuffer(text.encode(), np.uint8)


def expect_ranks(rank: int, name: str, found: Any, expected: list[int], instead: Mapping[str, Any]) -> None:
    """Raise `Wrong` unless just these ranks were named; `instead` is what known mistakes name."""
    if (ranks := found.tolist()) != expected:
        raise Wrong(f"rank {rank}: {name} are {ranks}, expected {expected}{known(instead, ranks.__eq__)}")


def expect_sent(rank: int, notes: Sequence[Note], sizes: list[int], instead: Mapping[str, Any] = {}) -> None:
    """Raise `Wrong` unless a rank sent messages of just these sizes, in this order; `instead`: as known mistakes do."""
    found = [note.bytes for note in sent_by(rank, notes)]
    if found != sizes:
        raise Wrong(f"rank {rank} sent messages of {found} bytes, expected {sizes}{known(instead, found.__eq__)}")


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
