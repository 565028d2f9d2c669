"""Lesson 16: what is checked, and for how many points.

Words, weights and states are made so that the right answer is known beforehand. Times are whole
numbers, so a judge can count moments one by one. What was sent is counted: digests must stay
digests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from judges import (
    NO_NUMBERS,
    ask_memory,
    ask_words,
    judge_memory,
    judge_training,
    judge_words,
    train,
)
from judges_damage import damage, nothing_wrong, several_differ
from judges_trace import (
    HORIZON,
    KINDS,
    as_arrays,
    beside,
    from_the_beginning,
    judge_trace,
    just_below,
    nobody_waits,
    read_trace,
    real_run,
    waits,
)
from judges_watch import SCENES, expect_finding, judge_scene, look_on, scene_case, scenes

from minidist.course.grader.contract import (
    COLLECTIVES,
    STRATEGIES,
    TRAINER,
    Arrays,
    Case,
    Check,
    Draw,
    Judge,
    Note,
    Task,
)
from minidist.full.trace import Event

BY_HAND = (*COLLECTIVES, *STRATEGIES)
ODD = Task(1, "who makes another call", (*BY_HAND, "minidist.full.comm.agree"))
DIFFERENCE = Task(2, "where the weights differ", (*BY_HAND, *TRAINER))
SLOW = Task(3, "the slow rank", ("minidist.draw.table",))
MEMORY = Task(4, "who runs out of memory", BY_HAND)
WATCH = Task(5, "a watchdog")


# ---------------------------------------------------------------- task 1: words


def words(*groups: Sequence[str]) -> Draw:
    """One case for each sequence of what the ranks say."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple({"words": np.frombuffer(text.encode(), np.uint8)} for text in group),
                f"{len(group)} ranks",
            )
            for group in groups
        ]

    return draw


# ---------------------------------------------------------------- task 3: traces


def traces(*makers: tuple[str, Callable[[np.random.Generator], list[Event]]]) -> Draw:
    """One case for each way to make events."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [Case((as_arrays(make(rng)),), label) for label, make in makers]

    return draw


# ---------------------------------------------------------------- task 4: accounts


def accounts(*cases: tuple[str, Sequence[Sequence[Sequence[int]]]]) -> Draw:
    """One case for each set of timelines: for every rank, samples of five categories. The capacity
    is 100.
    """

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple({"held": np.array(samples)} for samples in timelines),
                f"{len(timelines)} ranks, {label}",
            )
            for label, timelines in cases
        ]

    return draw


USUAL = [[40, 0, 20, 0, 1], [40, 0, 20, 25, 1], [40, 10, 20, 5, 1]]
MORE_ACTIVATIONS = [[40, 0, 20, 0, 1], [40, 0, 20, 45, 1], [40, 10, 20, 5, 1]]
OTHERS_BUFFERS = [[40, 0, 20, 0, 30], [40, 0, 20, 25, 30], [40, 10, 20, 5, 30]]
FULL = [[40, 0, 20, 0, 1], [40, 0, 20, 39, 1], [40, 10, 20, 5, 1]]
NEVER_TOGETHER = [[40, 0, 20, 39, 0], [40, 39, 20, 0, 0], [40, 0, 20, 0, 39]]


# ---------------------------------------------------------------- the checks


def odd(
    title: str, points: float, draw: Draw, wire: str = "threads", hidden: bool = False
) -> Check:
    """Check task 1."""
    return Check(ODD, title, points, draw, ask_words, judge_words, hidden, wire)


def difference(
    title: str, points: float, draw: Draw, wire: str = "threads", hidden: bool = False
) -> Check:
    """Check task 2."""
    return Check(DIFFERENCE, title, points, draw, train, judge_training, hidden, wire)


def slow(title: str, points: float, draw: Draw, hidden: bool = False) -> Check:
    """Check task 3."""
    return Check(SLOW, title, points, draw, read_trace, judge_trace, hidden)


def memory(
    title: str, points: float, draw: Draw, wire: str = "threads", hidden: bool = False
) -> Check:
    """Check task 4."""
    return Check(MEMORY, title, points, draw, ask_memory, judge_memory, hidden, wire)


def watch(
    title: str, points: float, draw: Draw, judge: Judge = judge_scene, hidden: bool = False
) -> Check:
    """Check task 5."""
    return Check(WATCH, title, points, draw, look_on, judge, hidden)


LONG, OTHER = "hierarchical_all_reduce(float32, 1048576, ", "all_reduce(float32, 0001, sum)"
LARGEST = "all_reduce(float32, 1000, max)"
# the letters have the same sum, and so have letters times places
WEIGHED, AS_HEAVY = "all_reduce(float32, 1310, sum)", "all_reduce(float32, 2120, sum)"
REDUCE, GATHER = "all_reduce(float32, 1000, sum)", "all_gather(float32, 1000)"
ACTIVATIONS = ("activations", [USUAL, MORE_ACTIVATIONS, USUAL])
BUFFERS = ("communication", [USUAL, USUAL, USUAL, OTHERS_BUFFERS])
TWICE = ("the same total twice", [USUAL, [[40, 0, 20, 45, 1], [40, 15, 35, 15, 1]], USUAL])

# the largest peak is neither the first that is too large nor the furthest above the median; equal
# ones; what is usual
SEVERAL = (
    ("two above", [[[40, 0, 20, 50, 1]], [[60, 0, 39, 25, 1]], [[40, 0, 20, 25, 1]]]),
    ("equal peaks", [USUAL, [[40, 0, 20, 65, 0]], [[80, 0, 20, 25, 0]]]),
    ("equal excess", [USUAL, USUAL, [[55, 0, 35, 25, 1]]]),
    ("many times as much", [USUAL, [[52, 0, 20, 30, 4]], USUAL]),
    ("one that is unlike the others", [USUAL, USUAL, [[0, 0, 60, 25, 1]], [[50, 0, 32, 25, 1]]]),
    (
        "it is in the median itself",
        [[[40, 0, 20, 10, 1]], [[40, 0, 20, 39, 1]], [[45, 0, 20, 41, 1]]],
    ),
    ("far below in one", [USUAL, [[58, 0, 0, 44, 1]], USUAL]),
)
MIDDLE = (
    ("less than the median", waits(44, 40, 30, 50, 52)),
    ("less than half of the largest", waits(25, 40, 44, 46, 52)),
    ("less than half of the others' median", waits(56, 40, 44, 54, 24)),
    ("just above half", waits(26, 30, 60, 60)),
    ("just below half", waits(60, 60, 20, 30)),
    ("two that wait least", waits(60, 10, 10, 60)),
)

CHECKS = [
    odd(
        "one rank calls another collective",
        6,
        words([REDUCE, GATHER, REDUCE], [REDUCE] * 4 + [GATHER]),
    ),
    odd("all call the same", 1, words([REDUCE] * 4, *([text] * 3 for text in NO_NUMBERS))),
    odd(
        "words that are nearly the same",
        1,
        words(
            [LONG + "mean", LONG + "sum", LONG + "sum"],
            [LARGEST, REDUCE, REDUCE],
            [OTHER, REDUCE, REDUCE],
            [WEIGHED, WEIGHED, AS_HEAVY],
        ),
    ),
    odd("rank 0 is the odd one", 2, words([REDUCE + "!", REDUCE, REDUCE, REDUCE])),
    odd("as many say one as the other", 1, words([REDUCE, GATHER], [GATHER, REDUCE])),
    odd("the same under mpirun", 3, words([REDUCE, REDUCE, GATHER]), "mpi"),
    difference("one bit of one number", 5, damage("bit", 1, 2, 2)),
    difference("nothing is wrong", 3, nothing_wrong),
    difference("two numbers change places", 2, damage("swap", 2, 1, 0, ranks=4)),
    difference("two arrays change places", 1, damage("exchange", 0, 1, 1)),
    difference("several differ", 1, several_differ),
    difference("the same under mpirun", 2, damage("sum", 0, 3, 1, ranks=2), "mpi"),
    slow("a run with a slow rank", 6, traces(("rank 2 of 4", real_run(2)))),
    slow("a run without one", 1, traces(("4 ranks", real_run(None)))),
    slow("nobody waits", 1, traces(("4 ranks", nobody_waits))),
    slow("waiting from the beginning", 1, traces(("3 ranks", from_the_beginning))),
    slow("messages posted ahead, and a stream", 4, traces(("4 ranks", beside))),
    slow("less than half of the median", 1, traces(("4 ranks", just_below), *MIDDLE)),
    memory("one rank holds more", 4, accounts(ACTIVATIONS, BUFFERS, TWICE)),
    memory("several ranks, or categories", 1, accounts(*SEVERAL)),
    memory(
        "everything fits",
        3,
        accounts(("never together", [USUAL, NEVER_TOGETHER]), ("just full", [USUAL, FULL])),
    ),
    memory("the same under mpirun", 3, accounts(("activations", [MORE_ACTIVATIONS, USUAL])), "mpi"),
    watch(
        "a deadlock",
        4,
        scenes("three wait in a cycle", "who leads to the cycle moves", "a cycle downwards"),
    ),
    watch("a rank that has gone", 4, scenes("rank 2 has finished", "the second chain counts")),
    watch(
        "a rank that is slow",
        4,
        scenes("rank 2 computes for long", "rank 0 has waited for long", "nobody looked for long"),
    ),
    watch(
        "nothing to report",
        4,
        scenes("a message was on its way", "all is well", "a clock of whole seconds"),
    ),
]

# ---- hidden: other cases of the checks above ----


def spoken(rng: np.random.Generator) -> list[Case]:
    """Any number of ranks, each says one of three long texts that begin alike; and a tie."""
    sayings = [
        f"all_reduce(float32, {int(rng.integers(1e6))}, {op})" for op in ("sum", "max", "sum, ring")
    ]
    ranks = int(rng.integers(4, 8))
    texts = [sayings[i] for i in rng.choice(3, ranks, p=[0.6, 0.2, 0.2])]
    tie = [sayings[1], sayings[0], sayings[0], sayings[1], sayings[2]]
    return list(words(texts, tie)(rng))


def drawn_damage(kind: str) -> Draw:
    """Something happens, at some step, on some rank."""

    def draw(rng: np.random.Generator) -> list[Case]:
        ranks = int(rng.integers(3, 6))
        return list(
            damage(
                kind,
                int(rng.integers(3)),
                int(rng.integers(4)),
                int(rng.integers(ranks)),
                ranks=ranks,
            )(rng)
        )

    return draw


def at_random(rng: np.random.Generator) -> list[Event]:
    """Intervals anywhere, in no order; one rank has few."""
    events = []
    slow = int(rng.integers(5))
    for rank in rng.permutation(5).tolist():
        for _ in range(1 if rank == slow else 12):
            start, middle, end = np.sort(rng.integers(0, HORIZON, 3)).tolist()
            kind, waited = (
                KINDS[int(rng.integers(len(KINDS)))],
                float(middle) if rng.random() < 0.4 else None,
            )
            track = "main" if rng.random() < 0.8 else "+1"
            events.append(
                Event(rank, kind, kind, float(start), float(end), track=track, waited_from=waited)
            )
    return events


def silent(rng: np.random.Generator) -> list[Event]:
    """Rank 2 has never communicated; it has only computed."""
    return [Event(2, "compute", "forward", 0.0, 50.0)] + [
        Event(rank, "wait", "wait", float(rng.integers(0, 5)), 50.0) for rank in (0, 1, 3)
    ]


def some_rank_slow(rng: np.random.Generator) -> list[Event]:
    """A run, with other numbers."""
    ranks = int(rng.integers(3, 6))
    return real_run(int(rng.integers(ranks)), ranks)(rng)


def drawn_accounts(rng: np.random.Generator) -> list[Case]:
    """Timelines at random, around what fits."""
    cases = [
        ("drawn", rng.integers(0, 33, (int(rng.integers(2, 6)), 5, 5)).tolist()) for _ in range(2)
    ]
    return list(accounts(*cases)(rng))


def drawn_looks(rng: np.random.Generator) -> list[Case]:
    """Ranks that wait for others at random: some move on between two looks. In the end all is done,
    whatever it was.
    """
    cases = []
    for number in range(4):
        ranks, looks = int(rng.integers(3, 8)), []
        states = ["C"] * ranks
        for now in range(1, 13):
            for rank in range(ranks):
                if states[rank] != "F" and rng.random() < 0.35 and now < 9:
                    peer = int((rank + rng.integers(1, ranks)) % ranks)
                    states[rank] = str(
                        rng.choice([f"{peer}@{now - 0.5}", "C", f"{peer}@{now - 0.25}", "F"])
                    )
            looks.append(f"{now}: {' '.join(states)}")
        looks.append("14: " + "F " * ranks)
        cases.append(scene_case(f"drawn {number}, {ranks} ranks", 6.0, looks))
    return cases


def judge_looks(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Follow each chain for as many hops as there are ranks: where it is then, is where it ends."""
    given = case.given[0]
    for number, now in enumerate(given["now"].tolist()):
        doing, peer, since = (given[name][number] for name in ("doing", "peer", "since"))
        previous = (
            None
            if number == 0
            else [given[name][number - 1] for name in ("doing", "peer", "since")]
        )
        next_one = np.where(doing == 1, peer, np.arange(len(doing)))
        for rank in np.flatnonzero(doing == 1).tolist():
            chain = [rank]
            for _ in doing:
                chain.append(int(next_one[chain[-1]]))
            end = chain[-1]
            members = sorted(set(chain), key=chain.index)
            kind = {0: "slow", 1: "deadlock", 2: "gone"}[int(doing[end])]
            if kind == "deadlock":
                members = [end]
                while next_one[members[-1]] != end:
                    members.append(int(next_one[members[-1]]))
                lowest = members.index(min(members))
                members = members[lowest:] + members[:lowest]
            waits = [member for member in members if doing[member] == 1]
            still = previous is not None and all(
                (now_is[waits] == was[waits]).all()
                for now_is, was in zip((doing, peer, since), previous, strict=True)
            )
            if (kind == "slow" and now - since[rank] > given["limit"]) or (
                kind != "slow" and still
            ):
                return expect_finding(given, results[0], (kind, members), number + 1)
        if (doing == 2).all():
            return expect_finding(given, results[0], None, number + 1)
    raise AssertionError("every scene comes to an end")


SCENES["rank 0 only waits for a cycle"] = (
    100,
    ("1: 3@0 C 3@0 2@0", "2: 3@0 C 3@0 2@0"),
    ("deadlock", [2, 3]),
    2,
)

CHECKS += [
    odd("other words and rank counts, ties", 4, spoken, hidden=True),
    difference("the sum stays the same", 2, drawn_damage("sum"), hidden=True),
    difference("other steps, arrays, ranks", 2, drawn_damage("bit"), hidden=True),
    difference("minus zero", 2, damage("sign", 1, 1, 1), hidden=True),
    difference("not a number, on all alike", 2, damage("nan", 0, 1), hidden=True),
    slow(
        "events at random",
        4,
        traces(("5 ranks", at_random), ("5 ranks again", at_random)),
        hidden=True,
    ),
    slow("other runs", 2, traces(("some rank", some_rank_slow)), hidden=True),
    slow("a rank that never communicates", 1, traces(("rank 2 of 4", silent)), hidden=True),
    memory("timelines at random", 5, drawn_accounts, hidden=True),
    watch("outside of a cycle", 2, scenes("rank 0 only waits for a cycle"), hidden=True),
    watch("states at random", 5, drawn_looks, judge_looks, hidden=True),
]
