"""Lesson 01: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
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

KINDS = ("send", "recv")
FACTOR = 3  # what the workers of task 4 multiply with
UNTOUCHED = -1  # what stands in a buffer before anything has come

Plans = list[list[tuple[str, int]]]


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
    buffer = given["buffer"].copy() if comm.rank == root else np.full_like(given["buffer"], UNTOUCHED)
    comm.trace = Trace()
    exercise.chain_broadcast(buffer, root, int(given["pieces"]), comm)
    sent = sorted(event.start for event in comm.trace.events if event.kind == "send")
    came = [event.end for event in comm.trace.events if event.kind == "recv"]
    had = [sum(end <= start for end in came) for start in sent]
    return {"buffer": buffer, "had": had, "awaited": awaited(comm.trace)}


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
    told = {"done": np.array(done).reshape(-1, rows.shape[1]), "early": early, "awaited": awaited(comm.trace)}
    return told if results is None else told | {"results": results}


def stuck(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    return {"stuck": np.array(list(exercise.who_never_finishes(as_lists(given["plans"]))), dtype=int)}


def as_lists(plans: Array) -> Plans:
    """Return plans as task 5 takes them."""
    return [[(KINDS[kind], peer) for kind, peer in plan if kind >= 0] for plan in plans.tolist()]


# ---------------------------------------------------------------- judges: in the grader's process


def judge_token(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has the sum up to itself, rank 0 all of it, and sent one message to its right."""
    own = np.array([given["own"] for given in case.given])
    sums = np.cumsum(own, axis=0, dtype=own.dtype)
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        changed = {"the token comes home into the caller's array": sums[-1], "the token is added up in it": sums[rank]}
        expect_equal(rank, "the caller's `own`, which must stay as it is,", result["own"], own[rank], instead=changed)
        expected = sums[rank] if rank else sums[-1]  # it came home with all of them
        wrong = {
            "rank 0 adds its own once more when the token comes home": sums[-1] + own[0],
            "the rank does not add its own": sums[rank - 1],
            "the token goes round to the left": own[0] + own[rank:].sum(0, dtype=own.dtype),
            "it is the sum of all": sums[-1],
        }
        expect_equal(rank, "the returned token", result["token"], expected, instead=wrong)
        expect_dtype(rank, "the returned token", result["token"], own)
        if result["shared"]:
            raise Wrong(f"rank {rank}: the returned token is `own` itself or a view of it, expected a copy")
        expect_sent(case, notes, rank, [((rank + 1) % case.ranks, own[rank].nbytes)] if case.ranks > 1 else [])


def judge_halo(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each rank has its neighbours' ends around its piece, and sent its own ends."""
    width, pieces = int(case.given[0]["width"]), [given["piece"] for given in case.given]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        left, right = (rank - 1) % case.ranks, (rank + 1) % case.ranks
        before, piece, after = pieces[left][-width:], pieces[rank], pieces[right][:width]
        expect_equal(rank, "the caller's piece, which must stay as it is,", result["piece"], piece)
        expect_dtype(rank, "the extended piece", result["extended"], piece)
        nothing = np.zeros_like(before)
        wrong = {
            "the two ends that came are mixed up: messages of one tag arrive in the order in which they were sent": (
                np.concatenate([after, piece, before])
            ),
            "each neighbour sends its other end": np.concatenate([pieces[left][:width], piece, pieces[right][-width:]]),
            "the pieces lie on a line, where the first rank has no left neighbour": (
                np.concatenate([before if rank else nothing, piece, after if right else nothing])
            ),
        }
        expected = np.concatenate([before, piece, after])
        expect_equal(rank, "the extended piece", result["extended"], expected, instead=wrong)
        size = width * piece.itemsize
        expect_sent(case, notes, rank, [(right, size), (left, size)] if case.ranks > 1 else [])


def judge_chain(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Everybody has the root's buffer, and passed each piece on before the next came."""
    root, pieces = int(case.given[0]["root"]), int(case.given[0]["pieces"])
    buffer = case.given[root]["buffer"]
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        wrong = {
            "rank 0 is taken for the root": case.given[0]["buffer"],
            "what comes is received into an array of float64": buffer.view(np.float64).astype(buffer.dtype),
            "the numbers pass through float64": buffer.astype(np.float64).astype(buffer.dtype),
        }
        found, spare = result["buffer"], np.full_like(buffer, UNTOUCHED)
        expect_equal(rank, "the buffer", found, buffer, instead=wrong if buffer.itemsize == 8 else {}, before=spare)
        right = (rank + 1) % case.ranks
        passed_on = [(right, piece.nbytes) for piece in np.array_split(buffer, pieces) if right != root]
        sizes = sorted(note.bytes for note in sent_by(rank, notes))
        if len(sizes) == len(passed_on) and sum(sizes) == buffer.nbytes and [*dict(passed_on)] == [right]:
            order = [note.bytes for note in sent_by(rank, notes)]
            if order != [size for _, size in passed_on]:
                raise Wrong(
                    f"rank {rank} sent pieces of {order} bytes, expected {[size for _, size in passed_on]}, in this "
                    "order: cut and send them as numpy.array_split(buffer, pieces) does"
                )
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
        raise Wrong("rank 0: farm returned None, expected the results, also of no rows")
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        done = [next((i for i, row in enumerate(rows) if np.array_equal(row, one)), -1) for one in result["done"]]
        mine = [i for i, who in enumerate(owner) if who == rank]
        if rank and "results" in result:
            raise Wrong(f"rank {rank}: farm returned an array, expected None on all ranks but rank 0")
        if done != mine:
            whose = "rank 0 works on no row if there are workers" if workers and not rank else "each row once"
            whose = "row i goes to worker 1 + i % (P - 1)" if rank and len(done) == len(set(done)) else whose
            raise Wrong(f"rank {rank} called work() with rows {done}, expected {mine}: {whose}")
    for rank in range(case.ranks):
        mine = [i for i, who in enumerate(owner) if who == rank]
        expect_sent(case, notes, rank, [(0, size)] * len(mine) if rank else [(who, size) for who in owner if who])
    by_worker = np.concatenate([rows[worker :: workers or 1] for worker in range(workers or 1)])
    wrong = {"the results of worker 1 come first, then those of worker 2": FACTOR * by_worker}
    expect_equal(0, "the returned array", results[0]["results"], FACTOR * rows, instead=wrong)
    at_once = min(workers, len(rows))
    if int(results[0]["early"]) < at_once:
        raise Wrong(
            f"rank 0 had sent {results[0]['early']} rows when the first result came, expected at least {at_once}: "
            "only so many workers can work at a time"
        )


def judge_stuck(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Take away whatever message both ends stand at, until there is none: who has something left is stuck."""
    asked = as_lists(case.given[0]["plans"])
    found, left = results[0]["stuck"].tolist(), follow(asked)
    expected = [rank for rank, plan in enumerate(left) if plan]
    if found != expected:
        peers = {rank: left[rank][0][1] for rank in expected}
        counts = {
            (sender, peer): plan.count(("send", peer)) - asked[peer].count(("recv", sender))
            for sender, plan in enumerate(asked)
            for peer in range(len(asked))
        }
        wrong = {
            "a send is complete at once, as if somebody kept the message": unfinished(follow(asked, kept=True)),
            "you go through the ranks once, and not again when a later one has moved on": (
                unfinished(follow(asked, rounds=1))
            ),
            "only those are named who wait for one that is stuck, and not those who wait for one that has finished": (
                [rank for rank in expected if peers[rank] in expected]
            ),
            "sends and receives are only counted, and their order does not matter": (
                sorted({pair[balance < 0] for pair, balance in counts.items() if balance})
            ),
        }
        story = next((f": this is what comes out if {story}" for story, who in wrong.items() if who == found), "")
        raise Wrong(f"who_never_finishes({asked}) is {found}, expected {expected}{story}")


def unfinished(left: Plans) -> list[int]:
    """Return the ranks that have something left to do."""
    return [rank for rank, plan in enumerate(left) if plan]


def follow(plans: Plans, kept: bool = False, rounds: int | None = None) -> Plans:
    """Return what is left of plans; with `kept` sends wait for nobody, with `rounds` only so many looks are taken."""
    left, waiting, looks, moved = [list(plan) for plan in plans], list[tuple[int, int]](), 0, True
    while moved and looks != rounds:
        looks, moved = looks + 1, False
        for rank, plan in enumerate(left):
            while plan:
                kind, peer = plan[0]
                if kind == "send" and (kept or left[peer][:1] == [("recv", rank)]):
                    if kept:
                        waiting.append((rank, peer))
                    else:
                        left[peer].pop(0)
                elif kind == "recv" and (peer, rank) in waiting:
                    waiting.remove((peer, rank))
                else:
                    break
                plan.pop(0)
                moved = True
    return left


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
            more = " once more" if (note.to, note.bytes) in expected else ""
            raise Wrong(
                f"rank {rank} sent {note.bytes} bytes to rank {note.to}{more} ({note.line}), expected {words(expected)}"
            )
    order = "in this order " if in_order and not spare else ""
    raise Wrong(f"rank {rank} sent {words(found)}, expected {order}{words(expected)}")


def words(messages: list[tuple[int, int]]) -> str:
    """Return `2 messages: 8 bytes to rank 1, 8 bytes to rank 3`."""
    listed = ", ".join(f"{bytes} bytes to rank {to}" for to, bytes in messages[:4]) + ", ..." * (len(messages) > 4)
    return f"{len(messages)} message{'s' * (len(messages) > 1)}: {listed}" if messages else "no message"
