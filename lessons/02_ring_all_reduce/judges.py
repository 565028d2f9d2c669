"""Lesson 02, tasks 1 to 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator, Trace
from minidist.course.grader.contract import (
    SEEN,
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    awaited,
    expect_dtype,
    expect_equal,
    expect_orderly,
    sent_by,
)

UNTOUCHED = -1  # what stands in a chunk before anything has come


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def scatter(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and look whether the chunks stayed as they were."""
    kept = [chunk.copy() for chunk in np.array_split(given["buffer"], comm.size)]
    chunks, comm.trace = list(kept), Trace()
    shard = exercise.ring_reduce_scatter(chunks, comm)
    shared = isinstance(shard, np.ndarray) and any(np.shares_memory(shard, chunk) for chunk in kept)
    told = {
        "shard": shard,
        "kept": np.concatenate(kept),
        "shared": shared,
        "replaced": replaced(chunks, kept),
    }
    return told | {"awaited": awaited(comm.trace)}


def gather(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 on chunks of which only one's own holds data."""
    parts = np.array_split(given["buffer"], comm.size)
    kept = [
        part.copy() if rank == comm.rank else np.full_like(part, UNTOUCHED)
        for rank, part in enumerate(parts)
    ]
    chunks, comm.trace = list(kept), Trace()
    exercise.ring_all_gather(chunks, comm)
    told = {"chunks": np.concatenate(kept), "replaced": replaced(chunks, kept)}
    return told | {"awaited": awaited(comm.trace)}


def replaced(chunks: list[Array], kept: list[Array]) -> list[int]:
    """Return which entries of a list are other arrays than before."""
    return [
        number
        for number, (now, before) in enumerate(zip(chunks, kept, strict=True))
        if now is not before
    ]


def reduce(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    buffer, comm.trace = given["buffer"].copy(), Trace()
    exercise.ring_all_reduce(buffer, comm)
    return {"buffer": buffer, "awaited": awaited(comm.trace)}


def edges(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 with an empty buffer, then on one rank alone, then as usual."""
    exercise.ring_all_reduce(given["buffer"][:0].copy(), comm)
    alone = reduce(exercise, comm.split(color=comm.rank), given)
    return reduce(exercise, comm, given) | {"alone": alone["buffer"]}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_scatter(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has its shard of the sum, and sent every chunk but that one."""
    buffers = [given["buffer"] for given in case.given]
    shards = np.array_split(np.sum(buffers, axis=0, dtype=buffers[0].dtype), case.ranks)
    for rank, result in enumerate(results):
        shard, own = shards[rank], np.array_split(buffers[rank], case.ranks)[rank]
        if len(result["replaced"]):
            raise Wrong(
                f"rank {rank}: entries {result['replaced'].tolist()} of the caller's list are "
                "other arrays now"
            )
        expect_equal(rank, "after the call the caller's own input", result["kept"], buffers[rank])
        expect_dtype(rank, "the returned sum", result["shard"], buffers[rank])
        wrong: dict[str, Any] = {
            f"a rank ends with its right neighbour's chunk, {(rank + 1) % case.ranks}": shards[
                (rank + 1) % case.ranks
            ],
            "a rank does not add its own part": shard - own,
            "a rank adds its own part twice": shard + own,
            "a rank adds what it has sent, not its own chunk of what comes": lambda rank=rank: (
                sent_added(buffers)[rank]
            ),
        }
        if story := parts_added(rank, result["shard"], buffers):
            # which is asked for if nothing else fits
            wrong |= {story: SEEN}
        expect_equal(rank, "the returned sum", result["shard"], shard, instead=wrong, others=shards)
        if result["shared"]:
            raise Wrong(
                f"rank {rank}: the returned sum is one of the caller's chunks, expected an array "
                "of its own"
            )
    expect_ring(case, results, notes, 1, lambda rank, chunks: sum(chunks) - chunks[rank])


def parts_added(rank: int, found: Array, buffers: Sequence[Array]) -> str:
    """Return of which ranks' parts of which chunk a returned sum is made, as a clause, if it is
    one.
    """
    ranks = len(buffers)
    whole = (1 << ranks) - 1
    for step in range(ranks):
        index = (rank + step) % ranks
        parts = [np.array_split(buffer, ranks)[index] for buffer in buffers]
        for chosen in range(1, whole + (step > 0)):
            adding = [other for other in range(ranks) if chosen >> other & 1]
            if np.array_equal(found, sum(parts[other] for other in adding)) and len(found):
                if set(adding) == {(rank - 1) % ranks, rank} and not step:
                    return "a rank sends its own chunk on, not the sum that has come so far"
                if len(adding) == ranks - 1 and index == (rank + 1) % ranks:
                    return f"a step is left out: it is chunk {index}, summed over all ranks but one"
                if len(adding) == 1:
                    return (
                        f"nothing is added on the way: it is chunk {index} of rank {adding[0]} "
                        "alone"
                    )
                return f"only the parts of ranks {adding} are added, of chunk {index}"
    return ""


def sent_added(buffers: Sequence[Array]) -> list[Array]:
    """Return what each rank ends with if it adds what it has just sent to what comes."""
    ranks = len(buffers)
    partial = [np.array_split(buffer, ranks)[rank - 1] for rank, buffer in enumerate(buffers)]
    for _ in range(ranks - 1):
        if len({len(each) for each in partial}) > 1:
            return partial
        partial = [partial[rank - 1] + partial[rank] for rank in range(ranks)]
    return partial


def judge_gather(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has all chunks, and sent every one but its right neighbour's."""
    parts = [
        np.array_split(given["buffer"], case.ranks)[rank] for rank, given in enumerate(case.given)
    ]
    whole, owner = (
        np.concatenate(parts),
        np.repeat(np.arange(case.ranks), [len(part) for part in parts]),
    )
    for rank, result in enumerate(results):
        if len(result["replaced"]):
            raise Wrong(
                f"rank {rank}: entries {result['replaced'].tolist()} of the list are other arrays "
                "now, expected the caller's own to be filled"
            )
        late = [
            part if i != (rank + 1) % case.ranks else np.full_like(part, UNTOUCHED)
            for i, part in enumerate(parts)
        ]
        wrong: dict[str, Any] = {
            "the last chunk, the right neighbour's, never comes": np.concatenate(late)
        }
        wrong |= {
            how: np.where(owner == rank, whole, all)
            for how, all in through_float64(result["chunks"], whole).items()
        }
        added = {0 <= each <= case.ranks for each in (whole - result["chunks"]).tolist()} == {True}
        wrong |= {"what comes is added to what stands there": result["chunks"] if added else whole}
        if story := misplaced(rank, result["chunks"], parts):
            # which is asked for if nothing else fits
            wrong |= {story: SEEN}
        expect_equal(
            rank, "all chunks, one after the other,", result["chunks"], whole, instead=wrong
        )
    expect_ring(
        case, results, notes, 1, lambda rank, chunks: sum(chunks) - chunks[(rank + 1) % case.ranks]
    )


def misplaced(rank: int, found: Array, parts: Sequence[Array]) -> str:
    """Return which chunk holds what it should not, as a clause, if that can be told."""
    if found.shape != (sum(map(len, parts)),):
        return ""
    left = parts[rank - 1]
    chunks = np.split(found, np.cumsum([len(part) for part in parts])[:-1])
    astray = [
        chunk for chunk, part in zip(chunks, parts, strict=True) if not np.array_equal(chunk, part)
    ]
    if len(left) and all(
        np.array_equal(chunk[: len(left)], left[: len(chunk)]) for chunk in astray
    ):
        return "a rank sends its own chunk in every step, not the one that it received last"
    for index, chunk in enumerate(chunks):
        if np.array_equal(chunk, parts[index]):
            continue
        if index == rank and (chunk == UNTOUCHED).all():
            right = (rank + 1) % len(parts)
            return (
                f"the first chunk that rank {rank} sends is {right}, not its own, {rank}: each rank "
                "begins with a chunk that it does not hold, and overwrites its neighbour's own"
            )
        if index == rank:
            return (
                f"what comes first is written over the rank's own chunk, {rank}, which it has to "
                "send"
            )
        if (chunk == UNTOUCHED).all():
            return f"chunk {index} never comes, or is sent before it has come"
        for owner, part in enumerate(parts):
            if owner != index and np.array_equal(chunk[: len(part)], part[: len(chunk)]):
                return f"chunk {owner}, rank {owner}'s, is put where chunk {index} belongs"
    return ""


def judge_reduce(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has the sum, in place, at the price of both rounds."""
    buffers = [given["buffer"] for given in case.given]
    total = np.sum(buffers, axis=0, dtype=buffers[0].dtype)
    even = len(total) // case.ranks * case.ranks
    owner = np.repeat(np.arange(case.ranks), lengths(len(total), case.ranks))
    # of each chunk what its owner was given
    everyones = np.choose(owner, buffers) if case.ranks <= 32 else total
    for rank, result in enumerate(results):
        wrong = {
            "the mean is formed instead of the sum": total // case.ranks,
            "the elements that P does not divide are left out": (
                np.concatenate([total[:even], buffers[rank][even:]]) if even else total
            ),
            "the sums are not gathered, so that each rank has that of its own chunk alone": (
                np.where(owner == rank, total, buffers[rank])
            ),
            "the sums are gathered before a rank's own is written into its chunk": np.where(
                owner == rank, total, everyones
            ),
            "a rank's own sum is never written into its buffer: `chunks[i] = ...` changes the "
            "list alone": (np.where(owner == rank, buffers[rank], total)),
            "a rank adds its sum to what stands in its chunk, which is in the sum already": total
            + everyones,
            "what is gathered are the chunks as they were given, not their sums": everyones,
        } | through_float64(result["buffer"], total)
        name, given = "after the call the caller's buffer", buffers[rank]
        expect_equal(rank, name, result["buffer"], total, instead=wrong, before=given)
    expect_ring(
        case,
        results,
        notes,
        2,
        lambda rank, chunks: 2 * sum(chunks) - chunks[rank] - chunks[(rank + 1) % case.ranks],
    )


def judge_edges(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As task 3; the empty messages of the empty buffer do not count."""
    for rank, result in enumerate(results):
        expect_equal(
            rank, "the buffer of one rank alone", result["alone"], case.given[rank]["buffer"]
        )
    judge_reduce(case, results, [note for note in notes if note.bytes])


def through_float64(found: Array, expected: Array) -> dict[str, Array]:
    """Return what becomes of large whole numbers that were float64 on their way: all but their last
    digits is right.
    """
    if expected.dtype.kind != "i" or found.shape != expected.shape or found.dtype != expected.dtype:
        return {}
    off = found[found != expected]
    rounded = np.array_equal(off, off.astype(np.float64).astype(found.dtype))
    near = rounded and np.allclose(found, expected, rtol=1e-14, atol=0)
    return {
        "the numbers pass through float64": found if near else expected,
        "what comes is received into an array of float64": expected.view(np.float64).astype(
            expected.dtype
        ),
    }


def lengths(elements: int, ranks: int) -> list[int]:
    """Return the lengths of `numpy.array_split`'s chunks."""
    return [len(chunk) for chunk in np.array_split(np.empty(elements), ranks)]


def expect_ring(
    case: Case,
    results: Sequence[Arrays],
    notes: Sequence[Note],
    rounds: int,
    leaving: Callable[[int, list[int]], int],
) -> None:
    """Raise `Wrong` unless every rank sent only to its right, P - 1 messages a round, and just so
    many elements.
    """
    buffer, most = case.given[0]["buffer"], rounds * (case.ranks - 1)
    elements, ranks = len(buffer), case.ranks
    each = elements // ranks
    cuts = {
        "all are as long as the longest": [-(-elements // ranks)] * ranks,
        "the last one takes the whole remainder": [each] * (ranks - 1)
        + [elements - each * (ranks - 1)],
        "the remainder is left out": [each] * ranks,
    }
    expect_orderly(ranks, [result["awaited"] for result in results], notes)
    for rank in range(ranks):
        sent, right = sent_by(rank, notes), (rank + 1) % ranks
        astray = next((note for note in sent if note.to != right), None)
        if astray is not None:
            raise Wrong(
                f"rank {rank} sent to rank {astray.to} ({astray.line}), expected to rank {right} "
                "only"
            )
        if len(sent) > most:
            raise Wrong(
                f"rank {rank} sent {len(sent)} messages, expected {most}: after P - 1 steps "
                "every chunk was everywhere"
            )
        size = buffer.itemsize
        expected = leaving(rank, lengths(elements, ranks)) * size if ranks > 1 else 0
        found = sum(note.bytes for note in sent)
        if found != expected:
            longer = expected // most * sum(range(1, ranks)) * rounds
            wrong = {
                "whole buffers go round the ring": (ranks - 1) * elements * size,
                "every message is the whole buffer": most * elements * size,
                "the numbers travel in 8 bytes each": expected // size * 8,
                "each message holds all that the rank has by then, not only what came last": longer,
            } | {
                f"chunks are cut so that {how}": leaving(rank, cut) * size
                for how, cut in cuts.items()
            }
            story = next(
                (
                    f": this is what comes out if {each}"
                    for each, all in wrong.items()
                    if all == found
                ),
                "",
            )
            raise Wrong(f"rank {rank} sent {found} bytes in all, expected {expected}{story}")
