"""Lesson 01, tasks 4 and 5: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from judges import expect_sent

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
    known,
)

KINDS = ("send", "recv")

FACTOR = 3  # what the workers of task 4 multiply with

Plans = list[list[tuple[str, int]]]


def farm(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4; note which rows were worked on here, and how many had been sent when the first
    result came.
    """
    rows, done = given["rows"], []

    def work(row: Array) -> Array:
        if row.shape != rows.shape[1:]:
            raise Wrong(
                f"work() was called with an array of shape {row.shape}, expected one row, "
                f"{rows.shape[1:]}"
            )
        done.append(row.copy())
        return FACTOR * row

    comm.trace = Trace()
    results = exercise.farm(rows.copy() if comm.rank == 0 else None, rows.shape, work, comm)
    came = [event.end for event in comm.trace.events if event.kind == "recv"]
    sent = [event.start for event in comm.trace.events if event.kind == "send"]
    early = sum(start <= min(came) for start in sent) if came else 0
    told = {
        "done": np.array(done).reshape(-1, rows.shape[1]),
        "early": early,
        "awaited": awaited(comm.trace),
    }
    return told if results is None else told | {"results": results}


def stuck(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    return {
        "stuck": np.array(list(exercise.who_never_finishes(as_lists(given["plans"]))), dtype=int)
    }


def as_lists(plans: Array) -> Plans:
    """Return plans as task 5 takes them."""
    return [[(KINDS[kind], peer) for kind, peer in plan if kind >= 0] for plan in plans.tolist()]


def judge_farm(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Results are in order; every worker did its rows, each sent to it and answered once; all began
    at once.
    """
    rows, workers = case.given[0]["rows"], case.ranks - 1
    size = rows[:1].nbytes
    owner = [1 + i % workers if workers else 0 for i in range(len(rows))]
    if "results" not in results[0]:
        raise Wrong("rank 0: farm returned None, expected the results, also of no rows")
    expect_orderly(case.ranks, [result["awaited"] for result in results], notes)
    for rank, result in enumerate(results):
        done = [
            next((i for i, row in enumerate(rows) if np.array_equal(row, one)), -1)
            for one in result["done"]
        ]
        mine = [i for i, who in enumerate(owner) if who == rank]
        if rank and "results" in result:
            raise Wrong(
                f"rank {rank}: farm returned an array, expected None on all ranks but rank 0"
            )
        if done != mine:
            whose = (
                "rank 0 works on no row if there are workers"
                if workers and not rank
                else "each row once"
            )
            whose = (
                "row i goes to worker 1 + i % (P - 1)"
                if rank and len(done) == len(set(done))
                else whose
            )
            raise Wrong(f"rank {rank} called work() with rows {done}, expected {mine}: {whose}")
    for rank in range(case.ranks):
        mine = [i for i, who in enumerate(owner) if who == rank]
        expect_sent(
            case,
            notes,
            rank,
            [(0, size)] * len(mine) if rank else [(who, size) for who in owner if who],
        )
    by_worker = np.concatenate([rows[worker :: workers or 1] for worker in range(workers or 1)])
    found = results[0]["results"]
    expect_dtype(0, "the returned array", found, rows)
    wrong = {
        "the results of worker 1 come first, then those of worker 2": FACTOR * by_worker,
        "workers send the row back, not work(row)": rows,
        "one array receives all results: each needs a row of its own, or a copy": np.tile(
            found[-1:], (len(rows), 1)
        ),
    }
    expect_equal(0, "the returned array", found, FACTOR * rows, instead=wrong)
    at_once = min(workers, len(rows))
    if int(results[0]["early"]) < at_once:
        raise Wrong(
            f"rank 0 had sent {results[0]['early']} rows when the first result came, expected at "
            f"least {at_once}: only so many workers can work at a time"
        )


def judge_stuck(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Take away whatever message both ends stand at, until there is none: who has something left is
    stuck.
    """
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
            "the list is not sorted": found if sorted(found) == expected else None,
            "a send is complete at once, as if somebody kept the message": unfinished(
                follow(asked, kept=True)
            ),
            "a receive later in the plan is taken, although its rank has not got there": (
                unfinished(follow(asked, later=True))
            ),
            "a receive takes a message from whoever sends to this rank, not only from `source`": (
                unfinished(follow(asked, from_anyone=True))
            ),
            "you go through the ranks once, and not again when a later one has moved on": (
                unfinished(follow(asked, rounds=1))
            ),
            "each rank takes one step only": unfinished(follow(asked, rounds=1, steps=1)),
            "only those are named who wait for one that is stuck, and not those who wait for "
            "one that has finished": ([rank for rank in expected if peers[rank] in expected]),
            "only those are named who wait for each other, two by two": (
                [rank for rank in expected if peers.get(peers[rank]) == rank]
            ),
            "sends and receives are only counted, and their order does not matter": (
                sorted({pair[balance < 0] for pair, balance in counts.items() if balance})
            ),
            "those are listed that do finish": [rank for rank, plan in enumerate(left) if not plan],
        }
        says = f"who_never_finishes({asked}) is {found}, expected {expected}"
        raise Wrong(says + known(wrong, found.__eq__))


def unfinished(left: Plans) -> list[int]:
    """Return the ranks that have something left to do."""
    return [rank for rank, plan in enumerate(left) if plan]


def follow(
    plans: Plans,
    kept: bool = False,
    rounds: int | None = None,
    later: bool = False,
    from_anyone: bool = False,
    steps: int | None = None,
) -> Plans:
    """Return what is left of plans, if they are followed right, or with a mistake.

    With `kept` sends wait for nobody, with `later` a receive is taken wherever in the plan it
    stands, with `from_anyone` whoever sent it. With `rounds` only so many looks are taken, with
    `steps` so many steps in each.
    """
    left, waiting, looks, moved = [list(plan) for plan in plans], list[tuple[int, int]](), 0, True
    while moved and looks != rounds:
        looks, moved = looks + 1, False
        for rank, plan in enumerate(left):
            taken = 0
            while plan and taken != steps:
                kind, peer = plan[0]
                there = left[peer] if later else left[peer][:1]
                fits = [
                    call
                    for call in there
                    if call == ("recv", rank) or (from_anyone and call[0] == "recv")
                ]
                if kind == "send" and (kept or fits):
                    if kept:
                        waiting.append((rank, peer))
                    else:
                        left[peer].remove(fits[0])
                elif kind == "recv" and (peer, rank) in waiting:
                    waiting.remove((peer, rank))
                else:
                    break
                plan.pop(0)
                moved, taken = True, taken + 1
    return left
