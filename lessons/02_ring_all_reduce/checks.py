"""Lesson 02: what is checked, and for how many points.

All values are whole numbers, so sums are exact in any order and compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.grade.contract import Arrays, Case, Check, Draw, Note, Task, Wrong, expect_equal, sent_by

BY_HAND = ("minidist.collectives", "minidist.parallel")
SCATTER = Task(1, "ring reduce-scatter", BY_HAND)
GATHER = Task(2, "ring all-gather", BY_HAND)
REDUCE = Task(3, "ring all-reduce", BY_HAND)
COST = Task(4, "its cost", BY_HAND)
DTYPES = ("float64", "float32", "int64")


def buffers(*sizes: tuple[int, int], dtype: str = "float64") -> Draw:
    """Draw one case for each (ranks, elements): a buffer of whole numbers for every rank."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple({"buffer": rng.integers(1, 1000, elements).astype(dtype)} for _ in range(ranks)),
                f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {elements} elements of {dtype}",
            )
            for ranks, elements in sizes
        ]

    return draw


def questions(*sizes: tuple[int, int, int]) -> Draw:
    """Ask for the cost of (elements, itemsize, ranks): of every rank, and of one that is alone."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for elements, itemsize, ranks in sizes:
            asked = [[elements, itemsize, ranks, rank] for rank in range(ranks)] + [[elements, itemsize, 1, 0]]
            label = f"{elements} elements of {itemsize} bytes on {ranks} ranks"
            cases.append(Case(({"questions": np.array(asked)},), label))
        return cases

    return draw


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def scatter(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and look whether the chunks stayed as they were."""
    chunks = [chunk.copy() for chunk in np.array_split(given["buffer"], comm.size)]
    shard = exercise.ring_reduce_scatter(chunks, comm)
    return {"shard": shard, "kept": np.concatenate(chunks)}


def gather(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 on chunks of which only one's own holds data."""
    parts = np.array_split(given["buffer"], comm.size)
    chunks = [part.copy() if rank == comm.rank else np.full_like(part, -1) for rank, part in enumerate(parts)]
    exercise.ring_all_gather(chunks, comm)
    return {"chunks": np.concatenate(chunks)}


def reduce(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    buffer = given["buffer"].copy()
    exercise.ring_all_reduce(buffer, comm)
    return {"buffer": buffer}


def edges(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 as usual, then with an empty buffer, then on one rank alone."""
    usual = reduce(exercise, comm, given)
    exercise.ring_all_reduce(given["buffer"][:0].copy(), comm)
    alone = reduce(exercise, comm.split(color=comm.rank), given)
    return {"buffer": usual["buffer"], "alone": alone["buffer"]}


def cost(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    return {"costs": [exercise.all_reduce_cost(*map(int, question)) for question in given["questions"]]}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_scatter(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has its shard of the sum, and sent every chunk but that one."""
    shards = np.array_split(np.sum([given["buffer"] for given in case.given], axis=0), case.ranks)
    for rank, result in enumerate(results):
        expect_equal(rank, "the returned sum", result["shard"], shards[rank].astype(result["kept"].dtype))
        expect_equal(rank, "after the call the caller's own input", result["kept"], case.given[rank]["buffer"])
    expect_ring(case, notes, 1, lambda rank, chunks: sum(chunks) - chunks[rank])


def judge_gather(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has all chunks, and sent every one but its right neighbour's."""
    parts = [np.array_split(given["buffer"], case.ranks)[rank] for rank, given in enumerate(case.given)]
    for rank, result in enumerate(results):
        expect_equal(rank, "all chunks, one after the other,", result["chunks"], np.concatenate(parts))
    expect_ring(case, notes, 1, lambda rank, chunks: sum(chunks) - chunks[(rank + 1) % case.ranks])


def judge_reduce(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has the sum, in place, at the price of both rounds."""
    total = np.sum([given["buffer"] for given in case.given], axis=0)
    for rank, result in enumerate(results):
        expect_equal(rank, "after the call the caller's buffer", result["buffer"], total)
    expect_ring(case, notes, 2, lambda rank, chunks: 2 * sum(chunks) - chunks[rank] - chunks[(rank + 1) % case.ranks])


def judge_edges(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As task 3; the empty messages of the empty buffer do not count."""
    judge_reduce(case, results, [note for note in notes if note.bytes])
    for rank, result in enumerate(results):
        expect_equal(rank, "the buffer of one rank alone", result["alone"], case.given[rank]["buffer"])


def judge_cost(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The counts that `expect_ring` demands of task 3."""
    for question, answer in zip(case.given[0]["questions"].tolist(), results[0]["costs"].tolist(), strict=True):
        elements, itemsize, ranks, rank = question
        chunks = lengths(elements, ranks)
        leaving = 2 * elements - chunks[rank] - chunks[(rank + 1) % ranks]
        expected = [2 * (ranks - 1), leaving * itemsize]
        if answer != expected:
            raise Wrong(f"all_reduce_cost{tuple(question)} is {answer}, expected {expected}")


def lengths(elements: int, ranks: int) -> list[int]:
    """Return the lengths of `numpy.array_split`'s chunks."""
    return [len(chunk) for chunk in np.array_split(np.empty(elements), ranks)]


def expect_ring(case: Case, notes: Sequence[Note], rounds: int, leaving: Callable[[int, list[int]], int]) -> None:
    """Raise `Wrong` unless every rank sent only to its right, P - 1 messages a round, and just so many elements."""
    buffer, most = case.given[0]["buffer"], rounds * (case.ranks - 1)
    for rank in range(case.ranks):
        sent, right = sent_by(rank, notes), (rank + 1) % case.ranks
        astray = next((note for note in sent if note.to != right), None)
        if astray is not None:
            raise Wrong(f"rank {rank} sent to rank {astray.to} ({astray.line}), expected to rank {right} only")
        if len(sent) > most:
            raise Wrong(f"rank {rank} sent {len(sent)} messages, expected {most}")
        expected = leaving(rank, lengths(len(buffer), case.ranks)) * buffer.itemsize if case.ranks > 1 else 0
        found = sum(note.bytes for note in sent)
        if found != expected:
            raise Wrong(f"rank {rank} sent {found} bytes in {len(sent)} messages, expected {expected} bytes in {most}")


CHECKS = [
    Check(SCATTER, "adds up every chunk", 12, buffers((2, 6), (3, 12), (4, 8)), scatter, judge_scatter),
    Check(SCATTER, "chunks of unequal length", 6, buffers((3, 10), (5, 3)), scatter, judge_scatter),
    Check(SCATTER, "the same under mpirun", 4, buffers((3, 10)), scatter, judge_scatter, wire="mpi"),
    Check(GATHER, "passes every chunk on", 9, buffers((2, 6), (3, 12), (4, 8)), gather, judge_gather),
    Check(GATHER, "chunks of unequal length", 4, buffers((3, 10), (5, 3)), gather, judge_gather),
    Check(GATHER, "large chunks under mpirun", 4, buffers((3, 300_001)), gather, judge_gather, wire="mpi"),
    Check(REDUCE, "adds up in place", 12, buffers((2, 6), (3, 12), (4, 8)), reduce, judge_reduce),
    Check(REDUCE, "sizes that do not divide", 6, buffers((3, 10), (4, 7)), reduce, judge_reduce),
    Check(REDUCE, "fewer elements than ranks; none; one rank alone", 4, buffers((4, 2)), edges, judge_edges),
    Check(REDUCE, "the same under mpirun", 4, buffers((4, 10)), reduce, judge_reduce, wire="mpi"),
    Check(COST, "counts messages and bytes", 8, questions((12, 8, 4), (10, 4, 3)), cost, judge_cost),
]

# ---- hidden: the handout ends here ----


def drawn(cases: int) -> Draw:
    """Draw rank counts, sizes and dtypes as well."""

    def draw(rng: np.random.Generator) -> list[Case]:
        found: list[Case] = []
        for _ in range(cases):
            size = int(rng.integers(2, 8)), int(rng.integers(1, 50))
            found += buffers(size, dtype=str(rng.choice(DTYPES)))(rng)
        return found

    return draw


def asked(cases: int) -> Draw:
    """Draw questions."""

    def draw(rng: np.random.Generator) -> list[Case]:
        sizes = [
            (int(rng.integers(0, 1000)), int(rng.choice([2, 4, 8])), int(rng.integers(2, 9))) for _ in range(cases)
        ]
        return list(questions(*sizes)(rng))

    return draw


CHECKS += [
    Check(SCATTER, "other sizes and rank counts", 8, drawn(2), scatter, judge_scatter, hidden=True),
    Check(GATHER, "other sizes and rank counts", 6, drawn(2), gather, judge_gather, hidden=True),
    Check(REDUCE, "other sizes and rank counts", 6, drawn(3), reduce, judge_reduce, hidden=True),
    Check(COST, "other sizes", 4, asked(2), cost, judge_cost, hidden=True),
    Check(COST, "fewer elements than ranks", 3, questions((2, 8, 4)), cost, judge_cost, hidden=True),
]
