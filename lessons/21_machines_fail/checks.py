"""Lesson 21: what is checked, and for how many points. Only task 2 has ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import ModuleType
from typing import Any

import numpy as np
from judges import NAMES, judge_recovered, judge_view, own, state
from judges_batches import judge_batches, questions
from judges_time import Paces, judge_goodput, judge_spares, judge_straggler, paces

from minidist import Communicator
from minidist.course.grader.contract import (
    COLLECTIVES,
    STRATEGIES,
    TRAINER,
    Arrays,
    Case,
    Check,
    Draw,
    Task,
    Wrong,
    awaited,
    untouched,
)
from minidist.full.trace import Trace

BY_HAND = (
    "minidist.full.comm.membership",
    *TRAINER,
    *STRATEGIES,
    "minidist.plan",
)
VIEWS = Task(1, "who is left", BY_HAND)
HELD = Task(
    2,
    "what they hold",
    (*BY_HAND, *COLLECTIVES),
    may_use=("comm.all_gather_object",),
)
BATCHES = Task(3, "the same batches", BY_HAND)
SLOW = Task(4, "who is slow", BY_HAND)
TIME = Task(5, "what is left of the time", BY_HAND)

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *shapes: tuple[Any, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def vote(
    rng: np.random.Generator,
    label: str,
    members: str,
    here: str,
    dead: str = "",
    ranks: int = 4,
) -> Case:
    """Ask for a view of members whose numbers are in the order of these letters."""
    letters = "abcdefghij"
    numbers = np.sort(rng.choice(40, len(letters), replace=False))

    def drawn(names: str) -> np.ndarray[Any, Any]:
        return np.array([numbers[letters.index(name)] for name in names], np.int64)

    number = int(rng.integers(1, 9)) if members else 0
    given = {"number": np.array(number), "ranks": np.array(ranks)}
    lists = {"members": drawn(members), "here": drawn(here), "dead": drawn(dead)}
    return Case(({**given, **lists},), label)


def recovery(rng: np.random.Generator, label: str, *held: tuple[int, bool]) -> Case:
    """Draw weights in 64 bits, moments in 32, and a count; ranks have what their steps led to."""
    sizes = rng.integers(2, 9, 2)
    # steps before those of `held`; without any, some cases begin at step 0
    base = int(rng.integers(3, 20)) if AHEAD in held else 0
    shared: dict[str, Any] = {"count": np.array([base])}
    shared |= {"count of a step": np.array([1]), "count of nobody": np.array([-7])}
    for name, size, kind in zip(NAMES, sizes, (np.float64, np.float32), strict=False):
        for part in ("", " of a step", " of nobody"):
            shared[name + part] = rng.integers(-50, 50, size).astype(kind) / 4
    given = [
        {**shared, "done": np.array(done + base * (done >= 0)), "ready": np.array(ready)}
        for done, ready in held
    ]
    return Case(tuple(given), label)


def dealing(
    rng: np.random.Generator, samples: int, batch: int, largest: int, ranks: int, *steps: int
) -> Case:
    """Ask for the microbatches of all ranks in some steps."""
    epochs = max(steps) * batch * ranks // samples + 2
    orders = np.stack([rng.permutation(samples) for _ in range(epochs)])
    given = {"orders": orders, "asked": np.array([batch, largest, ranks]), "steps": np.array(steps)}
    words = f"{samples} samples, batch={batch}, largest={largest}, {ranks} ranks"
    return Case((given,), words + f", step {', '.join(map(str, steps))}")


def stops(rng: np.random.Generator, count: int) -> Case:
    """Ask for goodput; the last question is of a job that cannot go on."""
    mtbf = rng.uniform(2e3, 2e4, count)
    table = np.c_[
        mtbf,
        mtbf * rng.uniform(0.02, 0.08, count),
        mtbf * rng.uniform(0.05, 0.4, count),
        mtbf * rng.uniform(0.3, 0.9, count),
        rng.integers(3, 40, count),
    ]
    table[-1, 3:] = 7.5 * table[-1, 0], 5
    return Case(({"asked": table},), f"{count} jobs")


def pools(rng: np.random.Generator, *asked: tuple[int, float, float]) -> Case:
    """Ask for the spares of so many machines, of which so many are in repair on average."""
    rows = []
    for machines, mean, risk in asked:
        repair = rng.uniform(1e4, 9e4)
        rows.append((machines, machines * repair / mean, repair, risk))
    return Case(({"asked": np.array(rows)},), f"{len(rows)} jobs")


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def viewed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    members, here, dead = (given[name].tolist() for name in ("members", "here", "dead"))
    last = own(exercise, "View", {"number": int(given["number"]), "members": tuple(members)})
    found = exercise.next_view(last, tuple(here), frozenset(dead), int(given["ranks"]))
    if found is None:
        return {"refused": 1}
    if not isinstance(found, tuple) or len(found) != 2 or not hasattr(found[1], "__iter__"):
        raise Wrong(f"next_view returns {found!r}, expected a View or None")
    return {"refused": 0, "number": found[0], "members": np.array(list(found[1]), np.int64)}


def recovered(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2, with a step that adds to the arrays."""
    done, ready = int(given["done"]), bool(given["ready"])
    arrays = {name: array.copy() for name, array in state(given, done).items()}
    calls, comm.trace = 0, Trace()

    def take_step() -> None:
        nonlocal calls
        calls += 1
        for name, array in arrays.items():
            array += given[f"{name} of a step"]

    mine = own(exercise, "Standing", {"done": done, "ready": ready})
    step = exercise.recover(mine, take_step, dict(arrays), comm)
    if not isinstance(step, Integral):
        raise Wrong(f"recover returns {step!r}, expected the number of a step, an int")
    return {"step": int(step), "calls": calls, "awaited": awaited(comm.trace), **arrays}


def dealt(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 for every rank."""
    batch, largest, ranks = given["asked"].tolist()
    counts, lengths, samples, weights = [], [], [], []
    asked: set[int] = set()

    def order(epoch: int) -> np.ndarray[Any, Any]:
        if not 0 <= epoch < len(given["orders"]):
            raise Wrong(f"microbatches asks for the order of epoch {epoch}, which no step here has")
        asked.add(epoch)
        return given["orders"][epoch].copy()

    for step, rank in questions(given):
        asked.clear()
        parts = exercise.microbatches(order, step, batch, largest, ranks, rank)
        if not isinstance(parts, list | tuple) or not all(map(is_part, parts)):
            raise Wrong(f"microbatches returns {parts!r}, expected a list of (samples, weight)")
        if len(asked - {0}) > 1:
            raise Wrong(
                f"in step {step} microbatches asks for the orders of epochs {sorted(asked)}: after "
                "a year that would be hundreds, so ask for epoch 0 and the step's own alone"
            )
        counts.append(len(parts))
        lengths += [len(rows) for rows, _ in parts]
        samples += [int(sample) for rows, _ in parts for sample in rows]
        weights += [float(weight) for _, weight in parts]
    found = {"counts": counts, "lengths": lengths, "samples": samples}
    told: dict[str, Any] = {name: np.array(each, np.int64) for name, each in found.items()}
    return told | {"weights": np.array(weights, np.float64)}


def is_part(part: Any) -> bool:
    """Tell whether something is (samples, weight)."""
    return isinstance(part, list | tuple) and len(part) == 2 and np.ndim(part[0]) == 1


def scored(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    rows, stages = (tuple(given[name].tolist()) for name in ("rows", "stages"))
    seconds = given["seconds"].copy()
    with untouched(seconds=seconds):
        found = exercise.straggler(seconds, rows, stages)
    if found is not None and (not isinstance(found, Integral) or found < 0):
        raise Wrong(f"straggler returns {found!r}, expected a rank or None")
    return {"found": -1 if found is None else int(found)}


def trained(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the first half of task 5."""
    asked = [(*each[:4], int(each[4])) for each in given["asked"].tolist()]
    return {"found": numbers("goodput", [exercise.goodput(*each) for each in asked])}


def spared(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run the second half of task 5."""
    asked = [(int(each[0]), *each[1:]) for each in given["asked"].tolist()]
    return {"found": numbers("spares", [exercise.spares(*each) for each in asked])}


def numbers(name: str, found: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return what a function has returned, if it is numbers."""
    for each in found:
        if not isinstance(each, Real):
            raise Wrong(f"{name} returns {each!r}, expected a number")
    return np.array([float(each) for each in found])


DECIDE = (
    ("half, without the lowest", "abcd", "cd"),
    ("half, with the lowest, whose rank is not 0", "dabc", "ac"),
    ("the dead have no vote", "abcd", "cb", "a"),
    ("newcomers have no vote", "abcd", "cfg"),
    ("half of the living, with their lowest", "abcde", "db", "a"),
    ("all are dead", "ab", "fe", "ab"),
    ("the first view", "", "cab", "", 3),
    ("a job that has shrunk", "abcde", "abc", "", 8),
    ("one died a moment ago", "abcde", "edc", "c"),
    ("all who came have died", "ab", "ba", "ab"),
    ("the dead of earlier views", "abcd", "bd", "ghi"),
    ("one of three", "abc", "a"),
    ("a newcomer has the lowest number", "cdef", "aef"),
    ("half, with their lowest, and a lower newcomer", "cdef", "acd"),
)
FOLLOW = (
    ("newcomers come behind", "dabc", "fced", "ab"),
    ("one died a moment ago", "abcd", "dcba", "d"),
    ("more than there is room for", "cab", "edabc"),
    ("fewer than before", "bcda", "cab", "d"),
    ("a newcomer has died", "bac", "abcf", "f"),
    ("newcomers with lower numbers", "efg", "abcefg", "", 3),
    ("more members than ranks", "dabc", "abcd", "", 3),
    ("nobody is lost", "bca", "abc", "", 3),
)
NEW, OLD, AHEAD = (-1, False), (4, False), (5, False)
READY, BEHIND = (4, True), (3, True)
NEWCOMERS = (
    ("one is new", AHEAD, AHEAD, NEW),
    ("three are new", AHEAD, NEW, NEW, AHEAD, NEW),
    ("rank 0 is new", NEW, AHEAD),
    ("all are new", NEW, NEW),
    ("before the first step", (0, False), NEW),
)
STEPS = (
    ("one is a step ahead", AHEAD, READY, NEW),
    ("nobody has taken the step", READY, READY, NEW),
    ("who has caught up serves", READY, AHEAD, NEW, NEW),
    ("one is not ready", (5, True), OLD, (5, True)),
    ("two steps behind", BEHIND, AHEAD),
)
SCORED = (
    Paces("one of four", (1, 1.5, 1, 1), (4, 4, 4, 4)),
    Paces("one of two", (1.5, 1), (4, 4)),
    Paces("nobody", (1, 1.1, 1.05), (4, 4, 4)),
    Paces("uneven rows", (1, 1, 1), (6, 4, 4)),
    Paces("fewer rows, and slow", (1, 1.8, 1), (4, 3, 4)),
    Paces("two bad steps", (1, 1, 1, 1), (4, 4, 4, 4), bad=2),
    Paces("two stages", (1, 3, 1, 3.1, 1, 3, 1, 4.5), (4,) * 8, (0, 1) * 4),
    Paces("two stages, of which one takes longer", (1, 1, 3, 3), (4,) * 4, (0, 0, 1, 1)),
    Paces("one of the quicker stage", (1.5, 1, 3, 3), (4,) * 4, (0, 0, 1, 1)),
    Paces("a quick one", (0.7, 1, 1, 1), (4, 4, 4, 4)),
    Paces("one without rows", (1, 1.5, 1, 9), (2, 2, 2, 0)),
    Paces("a stage without rows", (1, 1.5, 1), (2, 2, 0), (0, 0, 1)),
    Paces("two without rows", (1, 1.5, 1, 1), (2, 2, 0, 0)),
    Paces("just 1.3 times", (1, 1.3), (1, 1), noise=0.0),
    Paces("two alike", (1, 1.5, 1, 1.5), (1, 1, 1, 1), noise=0.0),
    Paces("a little in two of four", (1, 1, 1), (4, 4, 4), bad=1, worse=1.45, lengths=(1,) * 4),
    Paces(
        "slow in the short steps",
        (1, 1, 1),
        (4, 4, 4),
        bad=2,
        bad_steps=(0, 1, 2),
        worse=1.6,
        lengths=(1, 1, 10, 10, 10),
    ),
    Paces("of two slow ones the slower", (1, 1.4, 1, 1.8, 1), (4,) * 5),
)
CHECKS = [
    Check(VIEWS, "who may decide", 10, each(vote, *DECIDE), viewed, judge_view),
    Check(VIEWS, "who takes which rank", 8, each(vote, *FOLLOW), viewed, judge_view),
    Check(HELD, "newcomers", 8, each(recovery, *NEWCOMERS), recovered, judge_recovered),
    Check(
        HELD, "a step that some have taken", 8, each(recovery, *STEPS), recovered, judge_recovered
    ),
    Check(
        HELD,
        "the same under mpirun",
        4,
        each(recovery, ("one of each", READY, AHEAD, NEW)),
        recovered,
        judge_recovered,
        wire="mpi",
    ),
    Check(
        BATCHES,
        "shares and microbatches",
        11,
        each(
            dealing,
            (48, 8, 2, 4, 1),
            (48, 8, 2, 3, 0, 5),
            (48, 8, 3, 1, 2),
            (48, 7, 1, 3, 1),
            (24, 3, 2, 5, 1),
        ),
        dealt,
        judge_batches,
    ),
    Check(
        BATCHES,
        "where an epoch ends",
        6,
        each(dealing, (10, 4, 2, 2, 2, 3, 5), (8, 4, 2, 2, 1, 2, 3), (7, 5, 2, 3, 1, 2, 3)),
        dealt,
        judge_batches,
    ),
    Check(SLOW, "who is named", 11, each(paces, *SCORED), scored, judge_straggler),
    Check(TIME, "goodput", 6, each(stops, (4,)), trained, judge_goodput),
    Check(
        TIME,
        "spares",
        6,
        each(
            pools,
            (
                (48, 1.2, 0.05),
                (300, 6.5, 0.02),
                (8, 0.1, 0.2),
                (1000, 20.0, 0.1),
                (8, 3.0, 0.05),
                (8, 0.1, 1.0),
            ),
        ),
        spared,
        judge_spares,
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        VIEWS,
        "other jobs",
        5,
        each(
            vote,
            ("half, without the lowest", "abcdef", "cde"),
            ("half of the living", "cdab", "bi", "ac"),
            ("many are new", "ecad", "jaeig", "d", 4),
        ),
        viewed,
        judge_view,
        hidden=True,
    ),
    Check(
        HELD,
        "other ranks",
        5,
        each(
            recovery,
            ("five are needy", NEW, AHEAD, NEW, NEW, READY, NEW, OLD),
            ("nobody has taken the step", OLD, READY, OLD),
        ),
        recovered,
        judge_recovered,
        hidden=True,
    ),
    Check(
        BATCHES,
        "other batches",
        4,
        each(dealing, (29, 9, 2, 4, 1, 3, 6), (11, 6, 5, 2, 0, 1)),
        dealt,
        judge_batches,
        hidden=True,
    ),
    Check(
        SLOW,
        "other ranks",
        4,
        each(
            paces,
            Paces("one of three", (1, 1.02, 1.45), (4, 5, 4)),
            Paces("two bad steps of four", (1, 1, 1), (4, 4, 4), bad=1, lengths=(1,) * 4),
            Paces("two stages of two", (1, 2, 1.4, 2.1), (3, 3, 3, 3), (0, 1, 0, 1)),
        ),
        scored,
        judge_straggler,
        hidden=True,
    ),
    Check(TIME, "other jobs", 2, each(stops, (5,)), trained, judge_goodput, hidden=True),
    Check(
        TIME,
        "other pools",
        2,
        each(pools, ((100, 3.0, 0.01), (16, 0.5, 0.001))),
        spared,
        judge_spares,
        hidden=True,
    ),
]
