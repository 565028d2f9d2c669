"""Lesson 03, tasks 1 to 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator, Trace
from minidist.course.grader.compare import some_parts
from minidist.course.grader.contract import (
    SEEN,
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    awaited,
    expect_equal,
    expect_orderly,
    sent_by,
)

UNTOUCHED = -1  # what stands in a buffer before anything has come


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def broadcast(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    root, comm.trace = int(given["root"]), Trace()
    buffer = (
        given["buffer"].copy() if comm.rank == root else np.full_like(given["buffer"], UNTOUCHED)
    )
    exercise.tree_broadcast(buffer, root, comm)
    return {"buffer": buffer, "awaited": awaited(comm.trace)}


def halving(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2."""
    buffer, comm.trace = given["buffer"].copy(), Trace()
    exercise.halving_doubling(buffer, comm)
    return {"buffer": buffer, "awaited": awaited(comm.trace)}


def pairs(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3; look whether the input stayed as it was, and whether the arrays to be filled
    did.
    """
    lengths, comm.trace = given["lengths"], Trace()
    leaving = np.split(given["all"].copy(), np.cumsum(lengths[comm.rank])[:-1])
    kept = [np.full(length, UNTOUCHED, given["all"].dtype) for length in lengths[:, comm.rank]]
    arriving = list(kept)
    exercise.all_to_all(list(leaving), arriving, comm)
    replaced = [
        number
        for number, (now, one) in enumerate(zip(arriving, kept, strict=True))
        if now is not one
    ]
    told = {"came": np.concatenate(kept), "kept": np.concatenate(leaving), "replaced": replaced}
    return told | {"awaited": awaited(comm.trace)}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_tree(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the root's buffer, got it once, and no later than in round ceil(log2 P)."""
    root, rounds = int(case.given[0]["root"]), math.ceil(math.log2(case.ranks))
    buffer = case.given[root]["buffer"]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    before, own = np.full_like(buffer, UNTOUCHED), results[root]["buffer"]
    astray = {
        "another rank, such as 0, is taken for the root": before if root else buffer
    } | through_float64(own, buffer)
    expect_equal(root, "the buffer of the root, who has the data,", own, buffer, instead=astray)
    for rank, result in enumerate(results):
        number = (rank - root) % case.ranks
        wrong = through_float64(result["buffer"], buffer)
        wrong[
            f"nobody sends to rank {rank}, number {number} from the root, which gets the data in "
            f"round {number.bit_length()} at the latest"
        ] = before
        expect_equal(rank, "the buffer", result["buffer"], buffer, instead=wrong, before=before)
    got, ready = {root: 0}, [root]
    while ready:
        rank = ready.pop()
        for number, note in enumerate(sent_by(rank, notes), start=1):
            if note.bytes != buffer.nbytes:
                pieces = ": the buffer travels in pieces, expected all of it in one message" * (
                    note.bytes < buffer.nbytes
                )
                twice = ": the numbers travel in 8 bytes each" * (note.bytes == 8 * len(buffer))
                raise Wrong(
                    f"rank {rank} sent {note.bytes} bytes to rank {note.to}, expected "
                    f"{buffer.nbytes}{twice}{pieces}"
                )
            if note.to in got:
                raise Wrong(
                    f"rank {rank} sent to rank {note.to} ({note.line}), which had the data already"
                )
            got[note.to] = got[rank] + number
            if got[note.to] > rounds:
                raise Wrong(
                    f"rank {note.to} got the data in round {got[note.to]}, expected in round "
                    f"{rounds} at the latest{slow_tree(root, case.ranks, notes)}"
                )
            ready.append(note.to)


def slow_tree(root: int, ranks: int, notes: Sequence[Note]) -> str:
    """Return which slow way to everybody this is, in words that go behind the rejection."""
    sent = [len(sent_by(rank, notes)) for rank in range(ranks)]
    if sent[root] == ranks - 1:
        return (
            ": this is what comes out if the root sends to everybody itself, and ranks that have "
            "the data do not help"
        )
    if max(sent) == 1:
        return ": this is what comes out if the data goes along a chain, from rank to rank"
    if sent[root] == 2 and max(sent) <= 2:
        return ": this is what comes out if each rank sends to two others, and then rests"
    return ""


def judge_halving(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the sum; each message goes to the right partner and has the right size."""
    buffers = [given["buffer"] for given in case.given]
    total, power = np.sum(buffers, axis=0, dtype=buffers[0].dtype), 2 ** int(math.log2(case.ranks))
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    chunks = np.array_split(np.arange(len(total)), power) + [np.arange(0)] * (case.ranks - power)
    for rank, found in enumerate(result["buffer"] for result in results):
        wrong = {
            "the mean is formed, not the sum": total / case.ranks,
            "the mean is formed and rounded down, where a sum is asked for": total // case.ranks,
            "what the ranks from Q on hand in is written over the buffer of rank - Q, not "
            "added to it": (
                total - np.sum(buffers[: case.ranks - power], axis=0, dtype=total.dtype)
                if case.ranks > power
                else total
            ),
            "what the ranks from Q on hand in is added when all is summed: only rank - Q and its "
            "partner have it": sum(
                (
                    buffers[other]
                    for other in {rank % power + power, rank}
                    if power <= other < case.ranks
                ),
                start=np.sum(buffers[:power], axis=0, dtype=total.dtype),
            ),
            "the ranks from Q on are in no sum": np.sum(buffers[:power], axis=0, dtype=total.dtype),
            "the ranks from Q on never get the sum": (
                found if rank >= power and np.array_equal(found, buffers[rank]) else total
            ),
            "a rank does not add its own part": total - buffers[rank],
            "the doubling, which tells everybody the sums, is left out": (
                found
                if np.array_equal(found[chunks[rank]], total[chunks[rank]]) and len(chunks[rank])
                else total
            ),
        } | through_float64(found, total)
        for chunk in chunks:  # the first that is wrong: which ranks are in it
            if found.shape == total.shape and not np.array_equal(found[chunk], total[chunk]):
                of_it = [buffer[chunk] for buffer in buffers]
                if story := some_parts(found[chunk], of_it, 0.0):
                    wrong[
                        f"elements {chunk[0]}:{chunk[-1] + 1} are not summed over all ranks{story}"
                    ] = SEEN
                break
        expect_equal(
            rank, "the buffer", found, total, instead=wrong, before=buffers[rank], parts=buffers
        )
    for rank in [*range(power, case.ranks), *range(power)]:
        expect_exchanges(rank, case.ranks, total, notes)


def exchanges(rank: int, ranks: int, size: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (to whom, bytes) of what a rank sends in task 2, in order, if not empty; chunks have
    these lengths.
    """
    power, whole = len(lengths), sum(lengths) * size
    if rank >= power:
        return [(rank - power, whole)] if whole else []
    halves, distance = [], power // 2
    while distance:
        partner = rank ^ distance
        there, here = partner // distance * distance, rank // distance * distance
        halves.append(
            (partner, sum(lengths[there : there + distance]), sum(lengths[here : here + distance]))
        )
        distance //= 2
    back = [(rank + power, whole)] if rank + power < ranks else []
    down = [(partner, given_away * size) for partner, given_away, _ in halves]
    up = [(partner, kept * size) for partner, _, kept in reversed(halves)]
    return [message for message in down + up + back if message[1]]


def swapped(rank: int, ranks: int, size: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return what a rank sends in task 2 if it keeps the halves of its mirror image."""
    power = len(lengths)
    if rank >= power:
        return []
    mirrored = exchanges(power - 1 - rank, power, size, lengths)
    return [(power - 1 - to, bytes) for to, bytes in mirrored] + exchanges(
        rank, ranks, size, lengths
    )[len(exchanges(rank, power, size, lengths)) :]


def expect_exchanges(rank: int, ranks: int, buffer: Array, notes: Sequence[Note]) -> None:
    """Raise `Wrong` unless the rank sent what task 2 says, messages of no bytes left out."""
    power, size, elements = 2 ** int(math.log2(ranks)), buffer.itemsize, len(buffer)
    chunks = [len(part) for part in np.array_split(buffer, power)]
    by_elements = [elements * (i + 1) // power - elements * i // power for i in range(power)]
    found = [(note.to, note.bytes) for note in sent_by(rank, notes) if note.bytes]
    expected = exchanges(rank, ranks, size, chunks)
    if found == expected:
        return
    said = (
        f"rank {rank} sent {found or 'nothing'}, expected {expected} (to whom, bytes; empty "
        "messages left out)"
    )
    if found == exchanges(rank, ranks, 8, chunks):
        raise Wrong(f"{said}: this is what comes out if the numbers travel in 8 bytes each")
    if found == [(to, buffer.nbytes) for to, _ in sorted(expected)[: len(found)]] and len(
        found
    ) * 2 == len(expected):
        raise Wrong(
            f"{said}: this is what comes out if whole buffers are exchanged, and nothing is halved"
        )
    if sorted(found) == sorted(swapped(rank, ranks, size, chunks)):
        raise Wrong(
            f"{said}: this is what comes out if each rank keeps the half that it should send, "
            "and sends the other"
        )
    if found == exchanges(rank, ranks, size, by_elements):
        raise Wrong(
            f"{said}: this is what comes out if elements are halved, not the chunks of "
            "numpy.array_split"
        )
    if [bytes for _, bytes in found] == [bytes for _, bytes in expected]:
        whom = (
            "to rank - Q"
            if rank >= power
            else "first to the rank at distance Q/2, then at Q/4, ..., and back"
        )
        raise Wrong(f"{said}: the sizes are right, the partners are not: rank {rank} sends {whom}")
    if rank >= power:
        raise Wrong(
            f"{said}: rank Q and those above send their buffer to one rank, and get the "
            "result from the same rank"
        )
    raise Wrong(said)


def judge_pairs(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everything arrived; each rank sent one chunk to each other rank, and no two to the same at
    once.
    """
    lengths, size = case.given[0]["lengths"], case.given[0]["all"].itemsize
    chunks = [
        np.split(given["all"], np.cumsum(lengths[rank])[:-1])
        for rank, given in enumerate(case.given)
    ]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        expect_filled(rank, result["replaced"].tolist())
        came = np.concatenate([chunks[source][rank] for source in range(case.ranks)])
        owner = np.repeat(np.arange(case.ranks), lengths[:, rank].tolist())
        wrong = {
            how: np.where(owner == rank, came, all)
            for how, all in through_float64(result["came"], came).items()
        }
        own = np.where(owner == rank, UNTOUCHED, came)
        wrong |= {
            "what a rank has for itself is not copied": own.astype(came.dtype),
            "each rank sends the chunk that it has for itself to all, as an all-gather does: rank j "
            "is to get leaving[j]": np.concatenate(
                [
                    np.resize(each[source], lengths[source, rank])
                    for source, each in enumerate(chunks)
                ]
            ),
            "each rank sends its first chunk to all: rank j is to get leaving[j]": np.concatenate(
                [np.resize(each[0], lengths[source, rank]) for source, each in enumerate(chunks)]
            ),
            "all send to rank 0 alone, as a gather does": came
            if rank == 0
            else own.astype(came.dtype)
            if np.array_equal(result["came"], own)
            else np.full_like(came, UNTOUCHED),
        }
        if story := astray(rank, result["came"], chunks):
            wrong[story] = SEEN
        expect_equal(
            rank, "what came, one chunk after the other,", result["came"], came, instead=wrong
        )
        expect_equal(
            rank, "what leaves, one chunk after the other,", result["kept"], case.given[rank]["all"]
        )
        others = [(to, size * int(lengths[rank, to])) for to in range(case.ranks) if to != rank]
        found = sorted((note.to, note.bytes) for note in sent_by(rank, notes))
        if found != others:
            ring = ": chunks go round the ring, expected straight to their owners" * (
                len(dict(found)) < len(others)
            )
            raise Wrong(
                f"rank {rank} sent {found}, expected one chunk to each other rank: {others} (to, "
                f"bytes){ring}"
            )
    for step, sends in enumerate(
        zip(*(sent_by(rank, notes) for rank in range(case.ranks)), strict=True), start=1
    ):
        targets = [note.to for note in sends]
        for first, to in enumerate(targets):
            if to in targets[first + 1 :]:
                second = targets.index(to, first + 1)
                raise Wrong(
                    f"in step {step} ranks {first} and {second} both send to rank {to}, "
                    "expected one sender a step"
                )


def astray(rank: int, found: Array, chunks: Sequence[Sequence[Array]]) -> str:
    """Return which chunk stands where another belongs, as a clause, if that can be told."""
    ends = np.cumsum([len(leaving[rank]) for leaving in chunks])
    for source, came in enumerate(np.split(found, ends[:-1])):
        if np.array_equal(came, chunks[source][rank]):
            continue
        if (came == UNTOUCHED).all() and source != rank:
            return (
                f"no step brings rank {source}'s chunk to rank {rank}: `arriving[{source}]` is "
                "never written"
            )
        for other, leaving in enumerate(chunks):
            for to, chunk in enumerate(leaving):
                if np.array_equal(np.resize(chunk, came.shape), came) or (
                    np.array_equal(came[: len(chunk)], chunk[: len(came)])
                ):
                    if to == rank != other:
                        return f"what rank {other} sent is put into arriving[{source}]"
                    if to == other:
                        return (
                            f"arriving[{source}] gets leaving[{to}] of rank {other}, which stays "
                            "there"
                        )
                    return (
                        f"arriving[{source}] gets leaving[{to}] of rank {other}, which is for "
                        f"rank {to}"
                    )
    return ""


def expect_filled(rank: int, replaced: list[int]) -> None:
    """Raise `Wrong` if entries of the list `arriving` are not the caller's arrays any more."""
    if replaced == [rank]:
        raise Wrong(
            f"rank {rank}: arriving[{rank}] is another array now, perhaps leaving[{rank}], "
            "expected a copy in it"
        )
    if replaced:
        raise Wrong(
            f"rank {rank}: entries {replaced} of `arriving` are other arrays now, expected the "
            "caller's filled"
        )


def through_float64(found: Array, expected: Array) -> dict[str, Array]:
    """Return what becomes of large whole numbers that were float64 on their way: all but their last
    digits is right.
    """
    if expected.dtype.kind != "i" or found.shape != expected.shape or found.dtype != expected.dtype:
        return {}
    near = np.allclose(found, expected, rtol=1e-14, atol=0)
    return {
        "the numbers pass through float64": found if near else expected,
        "what comes is received into an array of float64": expected.view(np.float64).astype(
            expected.dtype
        ),
    }
