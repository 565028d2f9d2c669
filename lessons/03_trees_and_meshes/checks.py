"""Lesson 03: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit. Costs are compared with what the
package's own algorithms take on a modelled cluster's virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import minidist
from minidist import Cluster, Communicator
from minidist.collectives import all_reduce
from minidist.grade.contract import Arrays, Case, Check, Draw, Note, Task, Wrong, expect_equal, sent_by

BY_HAND = ("minidist.collectives", "minidist.parallel")
TREE = Task(1, "binomial tree", BY_HAND)
HALVING = Task(2, "halving and doubling", BY_HAND)
PAIRS = Task(3, "all-to-all", BY_HAND)
LEVELS = Task(4, "two levels", ("minidist.collectives.hierarchical",))
COST = Task(5, "which is fastest", ("minidist.collectives", "minidist.comm.threads", "minidist.comm.cluster"))
ALGORITHMS = {"ring": "ring", "tree": "tree", "doubling": "recursive", "halving_doubling": "halving_doubling"}


def each(make: Callable[..., Case], *sizes: tuple[int, ...]) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def buffers(rng: np.random.Generator, ranks: int, elements: int, **how: int) -> Case:
    """Draw a buffer of whole numbers for every rank; `how` is told to all."""
    told = {name: np.array(value) for name, value in how.items()}
    given = tuple({"buffer": rng.integers(1, 1000, elements).astype(float), **told} for _ in range(ranks))
    return Case(
        given, ", ".join([f"P = {ranks}", *(f"{name} {value}" for name, value in how.items()), f"n = {elements}"])
    )


def rooted(rng: np.random.Generator, ranks: int, root: int) -> Case:
    """Draw buffers, and name a root."""
    return buffers(rng, ranks, int(rng.integers(1, 9)), root=root)


def nodes(rng: np.random.Generator, count: int, ranks: int, elements: int) -> Case:
    """Draw buffers for `count` nodes of `ranks` each."""
    return buffers(rng, count * ranks, elements, nodes=count)


def chunks(rng: np.random.Generator, ranks: int) -> Case:
    """Draw a chunk of every rank for every rank, of 1 to 6 elements; all lengths are told to all."""
    lengths = rng.integers(1, 7, (ranks, ranks))
    given = tuple(
        {"all": rng.integers(1, 1000, lengths[r].sum()).astype(float), "lengths": lengths} for r in range(ranks)
    )
    return Case(given, f"P = {ranks}")


def questions(rng: np.random.Generator, ranks: int, microseconds: int, gigabytes: int) -> Case:
    """Ask for the cost of four sizes on one cluster, and for its crossover."""
    sizes = 8 * ranks * np.array([1, *rng.integers(2, 9000 // ranks, 3)])
    given = {"bytes": sizes, "cluster": np.array([ranks, microseconds * 1e-6, gigabytes * 1e9])}
    return Case((given,), f"P = {ranks}, {microseconds} microseconds, {gigabytes} GB/s")


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def tree(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    root = int(given["root"])
    buffer = given["buffer"].copy() if comm.rank == root else np.full_like(given["buffer"], -1)
    exercise.tree_broadcast(buffer, root, comm)
    return {"buffer": buffer}


def halving(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2."""
    buffer = given["buffer"].copy()
    exercise.halving_doubling(buffer, comm)
    return {"buffer": buffer}


def pairs(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3, and look whether the input stayed as it was."""
    lengths = given["lengths"]
    leaving = np.split(given["all"].copy(), np.cumsum(lengths[comm.rank])[:-1])
    arriving = [np.full(length, -1.0) for length in lengths[:, comm.rank]]
    exercise.all_to_all(leaving, arriving, comm)
    return {"came": np.concatenate(arriving), "kept": np.concatenate(leaving)}


def levels(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 on consecutive ranks as nodes."""
    buffer, per_node = given["buffer"].copy(), comm.size // int(given["nodes"])
    inside, across = comm.split(comm.rank // per_node), comm.split(comm.rank % per_node)
    exercise.hierarchical_all_reduce(buffer, inside, across)
    return {"buffer": buffer}


def cost(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5, first half."""
    ranks, latency, bandwidth = given["cluster"].tolist()
    ask = partial(exercise.cost, ranks=int(ranks), latency=latency, bandwidth=bandwidth)
    return {name: [float(ask(name, bytes)) for bytes in given["bytes"].tolist()] for name in ALGORITHMS}


def crossover(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5, second half."""
    ranks, latency, bandwidth = given["cluster"].tolist()
    return {"bytes": float(exercise.crossover(int(ranks), latency, bandwidth))}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_tree(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the root's buffer, got it once, and no later than in round ceil(log2 P)."""
    root, rounds = int(case.given[0]["root"]), math.ceil(math.log2(case.ranks))
    buffer = case.given[root]["buffer"]
    for rank, result in enumerate(results):
        expect_equal(rank, "the buffer", result["buffer"], buffer)
    got, ready = {root: 0}, [root]
    while ready:
        rank = ready.pop()
        for number, note in enumerate(sent_by(rank, notes), start=1):
            if note.bytes != buffer.nbytes:
                raise Wrong(f"rank {rank} sent {note.bytes} bytes to rank {note.to}, expected all {buffer.nbytes}")
            if note.to in got:
                raise Wrong(f"rank {rank} sent to rank {note.to} ({note.line}), which had the data already")
            got[note.to] = got[rank] + number
            if got[note.to] > rounds:
                raise Wrong(
                    f"rank {note.to} got the data in round {got[note.to]}, expected in round {rounds} at the latest"
                )
            ready.append(note.to)


def judge_halving(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the sum; each message goes to the right partner and has the right size."""
    total = np.sum([given["buffer"] for given in case.given], axis=0)
    for rank, result in enumerate(results):
        expect_equal(rank, "the buffer", result["buffer"], total)
    for rank in range(case.ranks):
        expect_sent(rank, notes, [message for message in exchanges(rank, case.ranks, len(total)) if message[1]])


def exchanges(rank: int, ranks: int, elements: int) -> list[tuple[int, int]]:
    """Return (to whom, bytes) of what a rank sends in task 2, in order."""
    power, size = 2 ** int(math.log2(ranks)), 8
    if rank >= power:
        return [(rank - power, elements * size)]
    lengths = [len(part) for part in np.array_split(np.empty(elements), power)]
    halves, distance = [], power // 2
    while distance:
        partner = rank ^ distance
        there, here = partner // distance * distance, rank // distance * distance
        halves.append((partner, sum(lengths[there : there + distance]), sum(lengths[here : here + distance])))
        distance //= 2
    back = [(rank + power, elements * size)] if rank + power < ranks else []
    down = [(partner, given_away * size) for partner, given_away, _ in halves]
    return down + [(partner, kept * size) for partner, _, kept in reversed(halves)] + back


def judge_pairs(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everything arrived; each rank sent one chunk to each other rank, and no two to the same at once."""
    lengths = case.given[0]["lengths"]
    chunks = [np.split(given["all"], np.cumsum(lengths[rank])[:-1]) for rank, given in enumerate(case.given)]
    for rank, result in enumerate(results):
        came = np.concatenate([chunks[source][rank] for source in range(case.ranks)])
        expect_equal(rank, "what came, one chunk after the other,", result["came"], came)
        expect_equal(rank, "what leaves, one chunk after the other,", result["kept"], case.given[rank]["all"])
        others = [(to, 8 * int(lengths[rank, to])) for to in range(case.ranks) if to != rank]
        found = sorted((note.to, note.bytes) for note in sent_by(rank, notes))
        if found != others:
            raise Wrong(f"rank {rank} sent {found}, expected one chunk to each other rank: {others} (to, bytes)")
    for step, sends in enumerate(zip(*(sent_by(rank, notes) for rank in range(case.ranks)), strict=True), start=1):
        targets = [note.to for note in sends]
        for first, to in enumerate(targets):
            if to in targets[first + 1 :]:
                second = targets.index(to, first + 1)
                raise Wrong(
                    f"in step {step} ranks {first} and {second} both send to rank {to}, expected one sender a step"
                )


def judge_levels(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the sum; few messages, and few bytes across nodes."""
    total, count = np.sum([given["buffer"] for given in case.given], axis=0), int(case.given[0]["nodes"])
    per_node = case.ranks // count
    share = math.ceil(math.ceil(len(total) / per_node) / count) * total.itemsize
    for rank, result in enumerate(results):
        expect_equal(rank, "the buffer", result["buffer"], total)
        sent = sent_by(rank, notes)
        across = [note for note in sent if note.to // per_node != rank // per_node]
        most = 2 * (count - 1) * share
        if count > 1 and not across:
            raise Wrong(f"rank {rank} sent no message to other nodes, expected {2 * (count - 1)}")
        if sum(note.bytes for note in across) > most:
            raise Wrong(f"rank {rank} sent {sum(note.bytes for note in across)} bytes to other nodes, expected {most}")
        for where, found, peers in (
            ("to other nodes", len(across), count),
            ("inside", len(sent) - len(across), per_node),
        ):
            if found > 2 * (peers - 1):
                raise Wrong(f"rank {rank} sent {found} messages {where}, expected {2 * (peers - 1)}")


def judge_cost(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The virtual clock says the same of the package's own algorithms."""
    ranks, latency, bandwidth = case.given[0]["cluster"].tolist()
    for name, algorithm in ALGORITHMS.items():
        for bytes, answer in zip(case.given[0]["bytes"].tolist(), results[0][name].tolist(), strict=True):
            cluster = Cluster.uniform(latency, bandwidth)
            clocks = minidist.run(partial(clock, algorithm, bytes // 8), int(ranks), cluster=cluster)
            if not math.isclose(answer, max(clocks), rel_tol=1e-9):
                raise Wrong(
                    f"cost({name!r}, {bytes} bytes, ...) is {answer:.6g} s, on the virtual clock {max(clocks):.6g} s"
                )


def clock(algorithm: str, elements: int, comm: Communicator) -> float:
    """Return when a rank has the sum."""
    all_reduce(np.zeros(elements), comm, algorithm=algorithm)
    return comm.clock()


def judge_crossover(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Where log2 P latencies more are made up for by fewer bytes; with two ranks never."""
    ranks, latency, bandwidth = case.given[0]["cluster"].tolist()
    rounds, answer = math.log2(ranks), float(results[0]["bytes"])
    expected = math.inf if ranks == 2 else latency * bandwidth / (1 - 2 * (ranks - 1) / (ranks * rounds))
    if not math.isclose(answer, expected, rel_tol=1e-9):
        raise Wrong(
            f"crossover({int(ranks)}, {latency:g}, {bandwidth:g}) is {answer:.6g} bytes, expected {expected:.6g}"
        )


def expect_sent(rank: int, notes: Sequence[Note], expected: list[tuple[int, int]]) -> None:
    """Raise `Wrong` unless the rank sent just these messages (to whom, bytes), those of no bytes left out."""
    found = [(note.to, note.bytes) for note in sent_by(rank, notes) if note.bytes]
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            raise Wrong(
                f"rank {rank}, message {number}: {one[1]} bytes to rank {one[0]}, expected {other[1]} to {other[0]}"
            )
    if len(found) != len(expected):
        raise Wrong(f"rank {rank} sent {len(found)} messages, expected {len(expected)}")


CHECKS = [
    Check(TREE, "doubles who has it", 8, each(rooted, (4, 0), (8, 0)), tree, judge_tree),
    Check(TREE, "any root, any number of ranks", 5, each(rooted, (4, 1), (6, 4), (1, 0)), tree, judge_tree),
    Check(TREE, "the same under mpirun", 3, each(rooted, (3, 1)), tree, judge_tree, wire="mpi"),
    Check(HALVING, "powers of two", 8, each(buffers, (2, 6), (4, 8), (8, 16)), halving, judge_halving),
    Check(HALVING, "lengths that do not divide", 4, each(buffers, (4, 7), (4, 2)), halving, judge_halving),
    Check(HALVING, "any number of ranks", 5, each(buffers, (3, 8), (6, 12), (1, 5)), halving, judge_halving),
    Check(HALVING, "the same under mpirun", 3, each(buffers, (3, 10)), halving, judge_halving, wire="mpi"),
    Check(PAIRS, "every chunk to its owner", 8, each(chunks, (3,), (4,)), pairs, judge_pairs),
    Check(PAIRS, "two ranks, and one alone", 3, each(chunks, (2,), (1,)), pairs, judge_pairs),
    Check(PAIRS, "the same under mpirun", 3, each(chunks, (3,)), pairs, judge_pairs, wire="mpi"),
    Check(LEVELS, "lets little cross nodes", 8, each(nodes, (2, 2, 8), (2, 3, 12)), levels, judge_levels),
    Check(LEVELS, "lengths that do not divide", 4, each(nodes, (2, 2, 7), (3, 2, 4)), levels, judge_levels),
    Check(LEVELS, "one node, or one rank a node", 2, each(nodes, (1, 3, 6), (3, 1, 6)), levels, judge_levels),
    Check(LEVELS, "the same under mpirun", 3, each(nodes, (1, 2, 10)), levels, judge_levels, wire="mpi"),
    Check(COST, "what the virtual clock says", 6, each(questions, (2, 5, 2), (8, 10, 1)), cost, judge_cost),
    Check(COST, "crossover", 4, each(questions, (4, 10, 1), (2, 10, 1)), crossover, judge_crossover),
]

# ---- hidden: the handout ends here ----


def drawn(make: Callable[..., Case], *bounds: tuple[int, int]) -> Draw:
    """Draw two cases, each number of their size from `low` to `high`."""
    return lambda rng: [make(rng, *(int(rng.integers(low, high + 1)) for low, high in bounds)) for _ in range(2)]


CHECKS += [
    Check(TREE, "others", 4, drawn(rooted, (5, 8), (0, 4)), tree, judge_tree, hidden=True),
    Check(HALVING, "others", 5, drawn(buffers, (5, 8), (9, 40)), halving, judge_halving, hidden=True),
    Check(PAIRS, "others", 4, drawn(chunks, (5, 7)), pairs, judge_pairs, hidden=True),
    Check(LEVELS, "others", 4, drawn(nodes, (2, 3), (2, 3), (13, 40)), levels, judge_levels, hidden=True),
    Check(COST, "others", 4, each(questions, (4, 3, 5), (16, 20, 2)), cost, judge_cost, hidden=True),
    Check(
        COST, "other crossovers", 2, each(questions, (8, 3, 5), (32, 20, 2)), crossover, judge_crossover, hidden=True
    ),
]
