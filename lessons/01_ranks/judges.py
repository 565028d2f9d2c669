"""Lesson 01, tasks 1 to 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator, Trace
from minidist.course.grader.contract import (
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

UNTOUCHED = -1  # what stands in a buffer before anything has come


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def token(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, and look whether the input stayed as it was."""
    own, comm.trace = given["own"].copy(), Trace()
    token = exercise.pass_token(own, comm)
    shared = isinstance(token, np.ndarray) and np.shares_memory(token, own)
    return {"token": token, "own": own, "shared": shared, "awaited": awaited(comm.trace)}


def halo(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2, and look whether the input stayed as it was."""
    piece, comm.trace = given["piece"].copy(), Trace()
    extended = exercise.halo(piece, int(given["width"]), comm)
    return {"extended": extended, "piece": piece, "awaited": awaited(comm.trace)}


def chain(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3; for each piece that is sent, count those that had come until then."""
    root = int(given["root"])
    buffer = (
        given["buffer"].copy() if comm.rank == root else np.full_like(given["buffer"], UNTOUCHED)
    )
    comm.trace = Trace()
    exercise.chain_broadcast(buffer, root, int(given["pieces"]), comm)
    sent = sorted(event.start for event in comm.trace.events if event.kind == "send")
    came = [event.end for event in comm.trace.events if event.kind == "recv"]
    had = [sum(end <= start for end in came) for start in sent]
    return {"buffer": buffer, "had": had, "awaited": awaited(comm.trace)}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_token(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has the sum up to itself, rank 0 all of it, and sent one message to its right."""
    own = np.array([given["own"] for given in case.given])
    sums = np.cumsum(own, axis=0, dtype=own.dtype)
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    likely = token_mistakes(own, sums, [result["token"] for result in results])
    for rank, result in enumerate(results):
        changed = {
            "the token comes home into the caller's array": sums[-1],
            "the token is added up in it": sums[rank],
        }
        expect_equal(
            rank,
            "the caller's `own`, which must stay as it is,",
            result["own"],
            own[rank],
            instead=changed,
        )
        expected = sums[rank] if rank else sums[-1]  # it came home with all of them
        expect_dtype(rank, "the returned token", result["token"], own)
        wrong = {story: values[rank] for story, values in likely.items()}
        expect_equal(rank, "the returned token", result["token"], expected, instead=wrong)
        if result["shared"]:
            raise Wrong(
                f"rank {rank}: the returned token is `own` itself or a view of it, expected a copy"
            )
        expect_sent(
            case,
            notes,
            rank,
            [((rank + 1) % case.ranks, own[rank].nbytes)] if case.ranks > 1 else [],
        )


def token_mistakes(own: Array, sums: Array, found: Sequence[Array]) -> dict[str, list[Array]]:
    """Return what each rank would have, by mistake; those come first that fit on all ranks."""
    ranks, right = range(len(own)), [sums[-1], *sums[1:]]
    wrong = {
        "rank 0 adds its own once more when the token comes home": [sums[-1] + own[0], *sums[1:]],
        "the last rank does not send the token home, so rank 0 has what it began with": [
            own[0],
            *sums[1:],
        ],
        "a rank passes its own on, not the sum that has come so far": [
            own[-1],
            *(own[:-1] + own[1:]),
        ],
        "the rank does not add its own": [sums[-1], *sums[:-1]],
        "the token goes round to the left": [
            own[0] + own[rank:].sum(0, dtype=own.dtype) for rank in ranks
        ],
        "it is the sum of all": [sums[-1] for _ in ranks],
        **{
            f"rank {other}'s own is left out": [right[r] - own[other] for r in ranks]
            for other in ranks
        },
        **{f"it is rank {other}'s own alone": [own[other] for _ in ranks] for other in ranks},
    }
    fits = {story: all(map(np.array_equal, found, values)) for story, values in wrong.items()}
    return {story: wrong[story] for story in wrong if fits[story]} or wrong


def judge_halo(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has its neighbours' ends around its piece, and sent its own ends."""
    width, pieces = int(case.given[0]["width"]), [given["piece"] for given in case.given]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        left, right = (rank - 1) % case.ranks, (rank + 1) % case.ranks
        piece = pieces[rank]
        expect_equal(rank, "the caller's piece, which must stay as it is,", result["piece"], piece)
        expect_dtype(rank, "the extended piece", result["extended"], piece)
        expected = np.concatenate([pieces[left][-width:], piece, pieces[right][:width]])
        found = result["extended"]
        if found.shape == expected.shape and not np.array_equal(found[width:-width], piece):
            raise Wrong(
                f"rank {rank}: between the two ends the extended piece has {found[width:-width]}, "
                f"expected the rank's own piece, {piece}: what comes is put beside it, not over it"
            )
        wrong = halo_mistakes(rank, width, pieces)
        expect_equal(rank, "the extended piece", found, expected, instead=wrong)
        size = width * piece.itemsize
        expect_sent(case, notes, rank, [(right, size), (left, size)] if case.ranks > 1 else [])


def halo_mistakes(rank: int, width: int, pieces: list[Array]) -> dict[str, Array]:
    """Return what comes out by what stands at the two ends: any end of any neighbour, nothing, or
    ends too short.
    """
    ranks, piece = len(pieces), pieces[rank]
    left, right = pieces[(rank - 1) % ranks], pieces[(rank + 1) % ranks]
    nothing = np.zeros_like(piece[:width])

    def around(before: Array, after: Array) -> Array:
        return np.concatenate([before, piece, after])

    right_one = around(left[-width:], right[:width])

    wrong = {
        "the two ends that came are mixed up: messages of one tag arrive in the order in "
        "which they were sent": (
            # Only two ranks get both messages from the same one.
            around(right[:width], left[-width:]) if ranks == 2 else right_one
        ),
        "each neighbour sends its other end": around(left[:width], right[-width:]),
        "the pieces lie on a line, where the first rank has no left neighbour": (
            around(
                left[-width:] if rank else nothing, right[:width] if rank < ranks - 1 else nothing
            )
        ),
        "only one element is taken from each neighbour, whatever `width` is": around(
            left[-1:], right[:1]
        ),
        "whole pieces are taken, not their ends": around(left, right),
    }
    if ranks == 1:
        wrong["one rank alone has no neighbours: it is its own, on both sides"] = piece
        wrong["a rank alone has zeros at its ends: it is its own neighbour"] = around(
            nothing, nothing
        )
        wrong[
            "a rank alone puts its first elements in front: its own last ones come before them"
        ] = around(piece[:width], piece[-width:])
        wrong = dict(reversed(wrong.items()))  # what one rank does alone comes first
    ends = {
        "the left neighbour's last elements": (left[-width:], None),
        "the right neighbour's first elements": (None, right[:width]),
        "nothing": (piece[:0], piece[:0]),
        "zeros": (nothing, nothing),
        "its own first elements": (piece[:width], piece[:width]),
        "its own last elements": (piece[-width:], piece[-width:]),
        "the left neighbour's first elements": (left[:width], left[:width]),
        "the right neighbour's last elements": (right[-width:], right[-width:]),
        "what lies one element before the left neighbour's end": (left[-width - 1 : -1], None),
        "what lies one element after the right neighbour's beginning": (None, right[1 : width + 1]),
    }
    for front, (before, _) in ends.items():
        for behind, (_, after) in ends.items():
            other = (front, behind) == (
                "the left neighbour's first elements",
                "the right neighbour's last elements",
            )
            if before is not None and after is not None and not other:
                wrong.setdefault(
                    f"{front} stand in front of the piece, and {behind} behind it",
                    around(before, after),
                )
    return wrong


def judge_chain(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the root's buffer, and passed each piece on before the next came."""
    root, pieces = int(case.given[0]["root"]), int(case.given[0]["pieces"])
    buffer = case.given[root]["buffer"]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        wrong = {
            "rank 0 is taken for the root": case.given[0]["buffer"],
            "what comes is received into an array of float64": buffer.view(np.float64).astype(
                buffer.dtype
            ),
            "the numbers pass through float64": buffer.astype(np.float64).astype(buffer.dtype),
        }
        found, spare = result["buffer"], np.full_like(buffer, UNTOUCHED)
        wrong = wrong if buffer.itemsize == 8 else {}
        even = len(buffer) // pieces * pieces
        if root and not any(sent_by(root, notes)) and rank != root:
            wrong["places in the chain are counted from rank 0, and not from the root"] = spare
        wrong["the elements left over are never sent"] = np.concatenate(
            [buffer[:even], spare[even:]]
        )
        last = len(buffer) - len(np.array_split(buffer, pieces)[-1])
        wrong["the last piece is never sent"] = np.concatenate([buffer[:last], spare[last:]])
        expect_equal(rank, "the buffer", found, buffer, instead=wrong, before=spare)
        right = (rank + 1) % case.ranks
        passed_on = [
            (right, piece.nbytes) for piece in np.array_split(buffer, pieces) if right != root
        ]
        sizes = sorted(note.bytes for note in sent_by(rank, notes))
        if (
            len(sizes) == len(passed_on)
            and sum(sizes) == buffer.nbytes
            and [*dict(passed_on)] == [right]
        ):
            order = [note.bytes for note in sent_by(rank, notes)]
            if order != [size for _, size in passed_on]:
                last_first = "the last piece is sent first: " * (
                    order == [size for _, size in reversed(passed_on)]
                )
                raise Wrong(
                    f"rank {rank} sent pieces of {order} bytes, expected "
                    f"{[size for _, size in passed_on]}, in this order: {last_first}cut and send "
                    "them as numpy.array_split(buffer, pieces) does"
                )
        itemsize, each = buffer.itemsize, max(1, len(buffer) // pieces)
        of_length = [
            len(buffer[at : at + pieces]) * itemsize for at in range(0, len(buffer), pieces)
        ]
        rest = [each * itemsize] * pieces
        known = {
            "each piece has `pieces` elements, not the buffer `pieces` pieces": [
                (right, size) for size in of_length
            ],
            "the elements left over are never sent": [(right, size) for size in rest],
            "the last piece is never sent": passed_on[:-1],
            "the root sends every piece to all others itself, which is a star and no chain": [
                ((root + step) % case.ranks, size)
                for _, size in passed_on
                for step in range(1, case.ranks)
            ],
        }
        if rank not in (root, (root - 1) % case.ranks):
            known["the root sends to everybody itself, and nobody passes anything on"] = []
        expect_sent(
            case, notes, rank, passed_on, in_order=True, instead=known if right != root else {}
        )
        for number, had in enumerate(result["had"].tolist()):
            if had > number + 1:
                raise Wrong(
                    f"rank {rank} had received {had} pieces when it sent piece {number}, expected "
                    f"{number + 1}: pass each piece on before you wait for the next"
                )


def expect_sent(
    case: Case,
    notes: Sequence[Note],
    rank: int,
    expected: list[tuple[int, int]],
    in_order: bool = False,
    instead: Mapping[str, list[tuple[int, int]]] | None = None,
) -> None:
    """Raise `Wrong` unless the rank sent just these messages, each (to whom, bytes); `instead` has
    known mistakes.
    """
    sent = sent_by(rank, notes)
    found = [(note.to, note.bytes) for note in sent]
    if (found if in_order else sorted(found)) == (expected if in_order else sorted(expected)):
        return
    for story, messages in (instead or {}).items():
        if sorted(messages) == sorted(found):
            raise Wrong(
                f"rank {rank} sent {words(found)}, expected {words(expected)}: this is what "
                f"comes out if {story}"
            )
    spare = list(expected)
    for note in sent:
        if (note.to, note.bytes) in spare:
            spare.remove((note.to, note.bytes))
        else:
            more = " once more" if (note.to, note.bytes) in expected else ""
            raise Wrong(
                f"rank {rank} sent {note.bytes} bytes to rank {note.to}{more} ({note.line}), "
                f"expected {words(expected)}"
            )
    order = "in this order " if in_order and not spare else ""
    raise Wrong(f"rank {rank} sent {words(found)}, expected {order}{words(expected)}")


def words(messages: list[tuple[int, int]]) -> str:
    """Return `2 messages: 8 bytes to rank 1, 8 bytes to rank 3`."""
    listed = ", ".join(f"{bytes} bytes to rank {to}" for to, bytes in messages[:4]) + ", ..." * (
        len(messages) > 4
    )
    return (
        f"{len(messages)} message{'s' * (len(messages) > 1)}: {listed}"
        if messages
        else "no message"
    )
