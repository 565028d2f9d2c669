"""Lesson 01: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit. Tasks 1 to 4 name nothing that is
not allowed: no collective sends just these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator, Trace
from minidist.grade.contract import Array, Arrays, Case, Check, Draw, Note, Task, Wrong, expect_equal, sent_by

BY_HAND = ("minidist.collectives",)
TOKEN = Task(1, "a token round the ring", BY_HAND)
HALO = Task(2, "halo exchange", BY_HAND)
CHAIN = Task(3, "broadcast along a chain", BY_HAND)
FARM = Task(4, "a master and its workers", BY_HAND)
STUCK = Task(5, "who never finishes", ("minidist.comm.threads", "minidist.comm.world"))
KINDS = ("send", "recv")
FACTOR = 3  # what the workers of task 4 multiply with


def each(make: Callable[..., Case], *sizes: tuple[int, ...]) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def tokens(rng: np.random.Generator, ranks: int, elements: int, dtype: str = "float64") -> Case:
    """Draw an array of whole numbers for every rank."""
    given = tuple({"own": rng.integers(1, 1000, elements).astype(dtype)} for _ in range(ranks))
    return Case(given, f"P = {ranks}, {elements} elements of {dtype}")


def ring(rng: np.random.Generator, ranks: int, least: int, width: int) -> Case:
    """Draw a piece of `least` or up to three elements more for every rank."""
    pieces = [rng.integers(1, 1000, least + int(more)).astype(float) for more in rng.integers(0, 4, ranks)]
    lengths = ", ".join(str(len(piece)) for piece in pieces)
    given = tuple({"piece": piece, "width": np.array(width)} for piece in pieces)
    return Case(given, f"P = {ranks}, pieces of {lengths}, width {width}")


def chains(rng: np.random.Generator, ranks: int, elements: int, root: int, pieces: int) -> Case:
    """Draw a buffer for every rank, of which only the root's counts."""
    how = {"root": np.array(root), "pieces": np.array(pieces)}
    given = tuple({"buffer": rng.integers(1, 1000, elements).astype(float), **how} for _ in range(ranks))
    return Case(given, f"P = {ranks}, root {root}, {elements} elements in {pieces} pieces")


def farms(rng: np.random.Generator, ranks: int, rows: int, width: int) -> Case:
    """Draw rows, of which only rank 0's count."""
    given = tuple({"rows": rng.integers(1, 1000, (rows, width)).astype(float)} for _ in range(ranks))
    return Case(given, f"P = {ranks}, {rows} rows of {width}")


def plans(text: str, label: str = "") -> Case:
    """Read `s1 r1 / s0 r0`, a plan for each rank, into an array [ranks, steps, 2] of kind and peer; -1: no step."""
    rows = [[("sr".index(step[0]), int(step[1:])) for step in row.split()] for row in text.split("/")]
    table = np.full((len(rows), max(map(len, rows)), 2), -1)
    for rank, row in enumerate(rows):
        table[rank, : len(row)] = np.array(row, dtype=int).reshape(-1, 2)
    return Case(({"plans": table},), label or text.strip())


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def token(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and look whether the input stayed as it was."""
    own = given["own"].copy()
    return {"token": exercise.pass_token(own, comm), "own": own}


def halo(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2, and look whether the input stayed as it was."""
    piece = given["piece"].copy()
    return {"extended": exercise.halo(piece, int(given["width"]), comm), "piece": piece}


def chain(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3; for each piece that is sent, count those that had come until then."""
    root = int(given["root"])
    buffer = given["buffer"].copy() if comm.rank == root else np.full_like(given["buffer"], -1)
    comm.trace = Trace()
    exercise.chain_broadcast(buffer, root, int(given["pieces"]), comm)
    sent = sorted(event.start for event in comm.trace.events if event.kind == "send")
    came = [event.end for event in comm.trace.events if event.kind == "recv"]
    return {"buffer": buffer, "had": [sum(end <= start for end in came) for start in sent]}


def farm(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4; note which rows were worked on here, and how many had been sent when the first result came."""
    rows, done = given["rows"], []

    def work(row: Array) -> Array:
        done.append(row.copy())
        return FACTOR * row

    comm.trace = Trace()
    results = exercise.farm(rows.copy() if comm.rank == 0 else None, rows.shape, work, comm)
    came = [event.end for event in comm.trace.events if event.kind == "recv"]
    sent = [event.start for event in comm.trace.events if event.kind == "send"]
    early = sum(start <= min(came) for start in sent) if came else 0
    told = {"done": np.array(done).reshape(-1, rows.shape[1]), "early": early}
    return told if results is None else told | {"results": results}


def stuck(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    return {"stuck": np.array(list(exercise.who_never_finishes(as_lists(given["plans"]))), dtype=int)}


def as_lists(plans: Array) -> list[list[tuple[str, int]]]:
    """Return plans as task 5 takes them."""
    return [[(KINDS[kind], peer) for kind, peer in plan if kind >= 0] for plan in plans.tolist()]


# ---------------------------------------------------------------- judges: in the grader's process


def judge_token(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has the sum up to itself, rank 0 all of it, and sent one message to its right."""
    own = np.array([given["own"] for given in case.given])
    sums = np.cumsum(own, axis=0)
    for rank, result in enumerate(results):
        expected = sums[rank] if rank else sums[-1]  # it came home with all of them
        expect_equal(rank, "the returned token", result["token"], expected.astype(own.dtype))
        expect_equal(rank, "the input", result["own"], own[rank])
        expect_sent(case, notes, rank, [((rank + 1) % case.ranks, own[rank].nbytes)] if case.ranks > 1 else [])


def judge_halo(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has its neighbours' ends around its piece, and sent its own ends."""
    width = int(case.given[0]["width"])
    for rank, result in enumerate(results):
        left, right = (rank - 1) % case.ranks, (rank + 1) % case.ranks
        before, after = case.given[left]["piece"][-width:], case.given[right]["piece"][:width]
        piece = case.given[rank]["piece"]
        expect_equal(rank, "the extended piece", result["extended"], np.concatenate([before, piece, after]))
        expect_equal(rank, "the input", result["piece"], piece)
        expect_sent(case, notes, rank, [(right, 8 * width), (left, 8 * width)] if case.ranks > 1 else [])


def judge_chain(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the root's buffer, and passed each piece on before the next came."""
    root, pieces = int(case.given[0]["root"]), int(case.given[0]["pieces"])
    buffer = case.given[root]["buffer"]
    for rank, result in enumerate(results):
        expect_equal(rank, "the buffer", result["buffer"], buffer)
        right = (rank + 1) % case.ranks
        passed_on = [(right, piece.nbytes) for piece in np.array_split(buffer, pieces) if right != root]
        expect_sent(case, notes, rank, passed_on, in_order=True)
        for number, had in enumerate(result["had"].tolist()):
            if had > number + 1:
                raise Wrong(
                    f"rank {rank} had received {had} pieces when it sent piece {number}, expected {number + 1}: "
                    "pass each piece on before you wait for the next"
                )


def judge_farm(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Results are in order; every worker did its rows, each sent to it and answered once; all began at once."""
    rows, workers = case.given[0]["rows"], case.ranks - 1
    size = rows[:1].nbytes
    owner = [1 + i % workers if workers else 0 for i in range(len(rows))]
    if "results" not in results[0]:
        raise Wrong("rank 0: farm returned None, expected the results")
    expect_equal(0, "the returned array", results[0]["results"], FACTOR * rows)
    for rank, result in enumerate(results):
        mine = [i for i, who in enumerate(owner) if who == rank]
        if rank and "results" in result:
            raise Wrong(f"rank {rank}: farm returned an array, expected None on all ranks but rank 0")
        worked = f"what work() was called with, {len(result['done'])} rows,"
        expect_equal(rank, worked, result["done"], rows[mine])
        expect_sent(case, notes, rank, [(0, size)] * len(mine) if rank else [(who, size) for who in owner if who])
    at_once = min(workers, len(rows))
    if int(results[0]["early"]) < at_once:
        raise Wrong(
            f"rank 0 had sent {results[0]['early']} rows when the first result came, expected at least {at_once}: "
            "only so many workers can work at a time"
        )


def judge_stuck(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Take away whatever message both ends stand at, until there is none: who has something left is stuck."""
    asked = as_lists(case.given[0]["plans"])
    left, happens = [list(plan) for plan in asked], True
    while happens:
        heads = {(rank, *plan[0]) for rank, plan in enumerate(left) if plan}
        sends = [(rank, to) for rank, kind, to in heads if kind == "send" and (to, "recv", rank) in heads]
        for rank in {rank for pair in sends for rank in pair}:
            left[rank].pop(0)
        happens = bool(sends)
    found, expected = results[0]["stuck"].tolist(), [rank for rank, plan in enumerate(left) if plan]
    if found != expected:
        raise Wrong(f"who_never_finishes({asked}) is {found}, expected {expected}")


def expect_sent(
    case: Case, notes: Sequence[Note], rank: int, expected: list[tuple[int, int]], in_order: bool = False
) -> None:
    """Raise `Wrong` unless the rank sent just these messages, each (to whom, bytes)."""
    sent = sent_by(rank, notes)
    found = [(note.to, note.bytes) for note in sent]
    if (found if in_order else sorted(found)) == (expected if in_order else sorted(expected)):
        return
    spare = list(expected)
    for note in sent:
        if (note.to, note.bytes) in spare:
            spare.remove((note.to, note.bytes))
        else:
            raise Wrong(
                f"rank {rank} sent {note.bytes} bytes to rank {note.to} ({note.line}), expected {words(expected)}"
            )
    order = "in this order " if in_order and not spare else ""
    raise Wrong(f"rank {rank} sent {words(found)}, expected {order}{words(expected)}")


def words(messages: list[tuple[int, int]]) -> str:
    """Return `2 messages: 8 bytes to rank 1, 8 bytes to rank 3`."""
    listed = ", ".join(f"{bytes} bytes to rank {to}" for to, bytes in messages[:4]) + ", ..." * (len(messages) > 4)
    return f"{len(messages)} message{'s' * (len(messages) > 1)}: {listed}" if messages else "no message"


PLANS = ("s1 r2 / s2 r0 / s0 r1", "r2 s1 / r0 s2 / r1 s0", "s1 r2 / r0 s2 / r1 s0")  # s: send to, r: receive from
PLANS += ("s1 r1 / r0 s0 / r0", "s1 s3 / s2 r0 / s1 / r0", "s1 r2 / r0 r0 s2 / r1 s0 / ", "s1 / r2 r0 / s1")

CHECKS = [
    Check(TOKEN, "goes round once", 7, each(tokens, (2, 1), (3, 4)), token, judge_token),
    Check(TOKEN, "one rank alone", 2, each(tokens, (1, 3)), token, judge_token),
    Check(TOKEN, "the same under mpirun", 3, each(tokens, (2, 5)), token, judge_token, wire="mpi"),
    Check(HALO, "takes both neighbours' ends", 8, each(ring, (3, 2, 1), (4, 3, 2)), halo, judge_halo),
    Check(HALO, "both neighbours are the same rank", 4, each(ring, (2, 3, 2)), halo, judge_halo),
    Check(HALO, "one rank alone", 3, each(ring, (1, 4, 2)), halo, judge_halo),
    Check(HALO, "wide ends under mpirun", 3, each(ring, (2, 100_000, 100_000)), halo, judge_halo, wire="mpi"),
    Check(CHAIN, "passes every piece on", 8, each(chains, (3, 6, 0, 3), (4, 9, 0, 4)), chain, judge_chain),
    Check(
        CHAIN, "from another root, or one rank alone", 4, each(chains, (3, 5, 1, 2), (1, 5, 0, 2)), chain, judge_chain
    ),
    Check(CHAIN, "the same under mpirun", 3, each(chains, (3, 9, 2, 3)), chain, judge_chain, wire="mpi"),
    Check(FARM, "deals out and collects", 6, each(farms, (3, 4, 2), (4, 9, 3)), farm, judge_farm),
    Check(FARM, "rows left over, few, or none", 6, each(farms, (4, 7, 2), (4, 2, 3), (3, 0, 2)), farm, judge_farm),
    Check(FARM, "one rank alone", 2, each(farms, (1, 3, 2)), farm, judge_farm),
    Check(FARM, "the same under mpirun", 3, each(farms, (3, 5, 2)), farm, judge_farm, wire="mpi"),
    Check(STUCK, "rings, and who gets through", 14, lambda rng: [plans(text) for text in PLANS], stuck, judge_stuck),
]

# ---- hidden: the handout ends here ----


def any_tokens(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts and lengths, of other dtypes."""
    return [tokens(rng, *rng.integers((4, 1), (8, 30)).tolist(), dtype) for dtype in ("float32", "int64")]


def any_rings(rng: np.random.Generator) -> list[Case]:
    """Draw a width as long as the shortest pieces may be, on several ranks and on two."""
    width = int(rng.integers(2, 6))
    return [ring(rng, ranks, width, width) for ranks in (int(rng.integers(5, 8)), 2)]


def any_chains(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts, roots and pieces; with as many pieces as elements, too."""
    sizes = [(int(rng.integers(3, 7)), int(rng.integers(2, 8)), more) for more in (0, int(rng.integers(1, 9)))]
    return [chains(rng, ranks, pieces + more, int(rng.integers(1, ranks)), pieces) for ranks, pieces, more in sizes]


def any_farms(rng: np.random.Generator) -> list[Case]:
    """Draw rank counts and rows."""
    return [farms(rng, *rng.integers((2, 6), (7, 20)).tolist(), 3) for _ in range(2)]


def any_plans(rng: np.random.Generator) -> list[Case]:
    """Draw messages in an order that works; then reverse the end of some plans."""
    cases = []
    for damaged in (0, 1, 1, 2):
        ranks = int(rng.integers(4, 7))
        rows: list[list[str]] = [[] for _ in range(ranks)]
        for _ in range(3 * ranks):
            sender, receiver = rng.choice(ranks, 2, replace=False).tolist()
            rows[sender].append(f"s{receiver}")
            rows[receiver].append(f"r{sender}")
        for rank in range(damaged):
            rows[rank][-3:] = reversed(rows[rank][-3:])
        text = " / ".join(" ".join(row) for row in rows)
        cases.append(plans(text, f"P = {ranks}, {damaged} of them out of order"))
    return cases


CHECKS += [
    Check(TOKEN, "other sizes and rank counts", 4, any_tokens, token, judge_token, hidden=True),
    Check(HALO, "other sizes and rank counts", 6, any_rings, halo, judge_halo, hidden=True),
    Check(CHAIN, "other sizes, roots and rank counts", 5, any_chains, chain, judge_chain, hidden=True),
    Check(FARM, "other sizes and rank counts", 5, any_farms, farm, judge_farm, hidden=True),
    Check(STUCK, "other plans", 4, any_plans, stuck, judge_stuck, hidden=True),
]
