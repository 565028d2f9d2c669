"""Lesson 22, task 1: top-k with error feedback, the known mistakes, and the judges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import eq
from types import ModuleType
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_dtype,
    expect_ranks,
    known,
)

PLACE = 4  # bytes of a place


def summed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1 for some steps; note the bytes of each."""
    results: dict[str, Any] = {}
    kept = np.zeros_like(given["gradients"][0])
    received, sent = [], []
    for gradient in given["gradients"]:
        array, before = gradient.copy(), comm.traffic.bytes
        returned = exercise.sparse_all_reduce(array, kept, int(given["count"]), comm)
        if returned is not None:
            raise Wrong(
                f"sparse_all_reduce returns a {type(returned).__name__}, expected nothing: it "
                "changes `gradient` and `kept` in place"
            )
        received.append(array)
        sent.append(comm.traffic.bytes - before)
    return {**results, "received": np.array(received), "kept": kept, "sent": np.array(sent)}


def top_k(gradients: Array, count: int, how: str = "") -> tuple[Array, Array]:
    """Return what each step gives each rank [P, T, n], and what each rank keeps in the end [P, n];
    `gradients` are [P, T, n], and `how` is one of `SLIPS`.
    """
    ranks, steps, size = gradients.shape
    kept = np.zeros((ranks, size))
    received = np.zeros(gradients.shape)
    count = {
        "k + 1": min(size, count + 1),
        "k - 1": count - 1,
        "k / P": max(1, count // ranks),
    }.get(how, count)
    for step in range(steps):
        new = gradients[:, step].astype(np.float64)
        kept = kept * {"0.95": 0.95, "0.9": 0.9}.get(how, 1.0)
        whole = new + kept
        chosen = np.array([choice(*each, count, how) for each in zip(new, kept, strict=True)])
        if how == "places of rank 0":
            chosen[:] = chosen[0]
        mine = np.zeros_like(whole)  # what each rank sends, where it belongs
        source = new if how == "new values" else whole
        for rank in range(ranks):
            values = source[rank, chosen[rank]]
            mine[rank, chosen[rank]] = np.abs(values) if how == "sizes" else values
        received[:, step] = given_back(mine, chosen, new, whole, how)
        kept = left(whole, new, kept, mine, received[:, step], how)
    return received, kept


def choice(new: Array, kept: Array, count: int, how: str) -> Array:
    """Return the places that a rank chooses."""
    whole = new + kept
    order: Array = {
        "largest values": whole,
        "smallest": -np.abs(whole),
        "of the new": np.abs(new),
        "of the kept": np.abs(kept),
    }.get(how, np.abs(whole))
    return np.argsort(order, kind="stable")[len(order) - count :]


def given_back(mine: Array, chosen: Array, new: Array, whole: Array, how: str) -> Array:
    """Return what each rank has at the end of a step, from what each has sent."""
    ranks = len(mine)
    total = mine.sum(0)
    senders = np.zeros_like(mine)
    for rank in range(ranks):
        senders[rank, chosen[rank]] = 1
    if how == "the last one counts":
        total = np.zeros_like(total)
        for rank in range(ranks):
            total[chosen[rank]] = mine[rank, chosen[rank]]
    if how == "the first one counts":
        total = np.zeros_like(total)
        for rank in reversed(range(ranks)):
            total[chosen[rank]] = mine[rank, chosen[rank]]
    if how == "the largest of all":
        sizes = np.sort(np.abs(mine[mine != 0]))
        least = sizes[-min(len(sizes), chosen.shape[1])] if sizes.size else 0.0
        total = np.where(np.abs(mine) >= least, mine, 0.0).sum(0)
    if how == "mean":
        total = total / ranks
    if how == "mean of senders":
        total = total / np.maximum(1, senders.sum(0))
    every = np.tile(total, (ranks, 1))
    if how == "own alone":
        return mine
    if how == "own places":
        return every * senders
    if how == "untouched":
        return new
    if how == "all of it":
        return np.tile(new.sum(0), (ranks, 1))
    if how in ("new where nobody sent", "all where nobody sent"):
        own = new if how == "new where nobody sent" else whole
        return np.where(senders.any(0), every, own)
    return every + new if how == "adds to the gradient" else every


def left(whole: Array, new: Array, kept: Array, mine: Array, total: Array, how: str) -> Array:
    """Return what each rank keeps."""
    sent = mine != 0
    rest: Array = {
        "nothing is kept": np.zeros_like(whole),
        "sent again": whole,
        "error of the sum": whole - total,
        "error of the mean": whole - total / len(whole),
        "sent by anybody": np.where(total[0] != 0, 0.0, whole),
        "of this step": np.where(sent, 0.0, new),
        "sent twice": np.where(sent, 0.0, kept) + new * ~sent,
        "other sign": np.where(sent, 0.0, -whole),
        "what was sent": mine,
        "kept where sent": np.where(sent, kept, whole),
    }.get(how, np.where(sent, 0.0, whole))
    return rest


USUAL = (
    "nothing is kept",
    "sent again",
    "of this step",
    "of the new",
    "new values",
    "largest values",
)
OF_MANY_RANKS = ("sent by anybody", "the last one counts", "mean of senders")
SLIPS = {
    "untouched": "`gradient` stays as it was given: the sum is to be written into it, in place",
    "nothing is kept": "nothing is kept: what is not sent is lost for good, so there is no error "
    "feedback (`kept = kept + gradient` makes a new array; `kept +=` changes the old one)",
    "sent again": "what was sent stays in `kept`, so it is sent again in later steps",
    "of this step": "only this step's rest is kept: what waited longer is lost",
    "error of the sum": "`kept` loses the sum of what all ranks have sent, not what this rank has sent",
    "error of the mean": "`kept` loses the mean of what all ranks have sent, not what this rank has "
    "sent",
    "sent by anybody": "`kept` becomes 0 wherever anybody has sent something: what this rank has at "
    "such a place, and has not sent, is lost",
    "what was sent": "what was sent is kept, and the rest is lost",
    "other sign": "`kept` has the other sign: it is what was sent less what was there",
    "kept where sent": "where a rank has sent, the old rest stays in `kept`: it was sent, too",
    "of the new": "places are chosen by the new gradient alone, so what waits never becomes large "
    "enough",
    "of the kept": "places are chosen by what was kept before, without the new gradient",
    "new values": "the new gradient's values are sent, without what was kept at these places",
    "largest values": "the largest values are chosen, not the largest in size: -3 is larger than 2",
    "smallest": "the smallest elements are sent",
    "sizes": "the elements are sent without their signs",
    "the last one counts": "several ranks' values at the same place overwrite each other instead of "
    "adding up",
    "the first one counts": "of several ranks' values at the same place only the first one counts; "
    "they add up",
    "mean": "the sum is divided by the number of ranks",
    "mean of senders": "the sum is divided by the number of ranks that sent something to this place",
    "places of rank 0": "all ranks send the places that rank 0 has chosen, so one could as well "
    "all-reduce; each chooses its own",
    "own alone": "each rank has only what it has sent itself",
    "own places": "each rank has the sums only at the places that it has chosen itself",
    "k + 1": "k + 1 elements are sent",
    "k - 1": "k - 1 elements are sent",
    "k / P": "all ranks together send k elements; each rank sends k",
    "the largest of all": "only the k largest of all that was sent enter the sum: all of it does",
    "0.95": "what is kept decays, by 0.95 in each step: then something is lost",
    "0.9": "what is kept decays, by 0.9 in each step: then something is lost",
    "all of it": "the whole gradients are summed, not what was sent",
    "new where nobody sent": "a rank's own gradient stays in place where nobody has sent anything: it is 0 "
    "there",
    "all where nobody sent": "what a rank has not sent is in the result where nobody has sent anything: it "
    "is 0 there",
    "adds to the gradient": "the sum is added to the gradient instead of taking its place",
}


def told_apart(gradients: Array, count: int) -> bool:
    """Tell whether each of these mistakes gives something else than what is right."""
    received, kept = top_k(gradients, count)
    for how in USUAL + OF_MANY_RANKS * (len(gradients) > 1):
        wrong, rest = top_k(gradients, count, how)
        if np.allclose(wrong, received) and np.allclose(rest, kept):
            return False
    return True


def judge_sums(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """What each step gives, then what is kept: held against known mistakes."""
    gradients = np.stack([given["gradients"] for given in case.given])
    count = int(case.given[0]["count"])
    received, kept = top_k(gradients, count)
    wrong = {clause: top_k(gradients, count, how) for how, clause in SLIPS.items()}
    # what fits both arrays of all ranks is told, rather than what fits one of them
    fitting = {clause: each for clause, each in wrong.items() if fits(each, results)} or wrong
    tolerance = 1e-9 if gradients.dtype == np.float64 else 1e-5
    for rank, result in enumerate(results):
        expect_dtype(rank, "gradient", result["received"], gradients)
        expect_dtype(rank, "kept", result["kept"], gradients)
    for step in range(gradients.shape[1]):
        expect_ranks(
            f"{case.label}: after step {step + 1} the gradient",
            [result["received"][step] for result in results],
            list(received[:, step]),
            tolerance,
            instead={clause: each[0][:, step] for clause, each in fitting.items()},
            before=list(gradients[:, step]),
        )
    expect_ranks(
        f"{case.label}: after {gradients.shape[1]} steps `kept`",
        [result["kept"] for result in results],
        list(kept),
        tolerance,
        instead={clause: each[1] for clause, each in fitting.items()},
        before=[np.zeros_like(each) for each in kept],
    )
    for rank, result in enumerate(results):
        if not np.array_equal(result["received"], results[0]["received"]):
            raise Wrong(
                f"{case.label}: ranks 0 and {rank} have sums that differ in their last bits: add "
                "the ranks' values in the same order on every rank, or models drift apart"
            )


def fits(wrong: tuple[Array, Array], results: Sequence[Arrays]) -> bool:
    """Tell whether a mistake gives what an answer gave, in all steps and on all ranks."""
    return all(
        np.allclose(result[name], each[rank], rtol=1e-5, atol=1e-6)
        for name, each in zip(("received", "kept"), wrong, strict=True)
        for rank, result in enumerate(results)
        if result[name].shape == each[rank].shape
    )


def judge_bytes(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> dict[str, float]:
    """K places and k values to each other rank, in each step."""
    gradients = case.given[0]["gradients"]
    size, item = gradients.shape[1], gradients.itemsize
    count, others = int(case.given[0]["count"]), case.ranks - 1
    expected = others * count * (PLACE + item)
    wide = "places travel as numbers of 8 bytes; n is far below 2^31, so 4 are enough"
    if item < 8:
        wide = f"{wide}, or values as float64"
    ways = {
        wide: others * count * (8 + item),
        "places travel as numbers of the values' type": others * count * 2 * item,
        "no places travel": others * count * item,
        "the whole gradient travels, with zeros in it": others * size * item,
        "all elements travel that are not smaller than number k, which here is 0: that is all of "
        "them, and k are to travel": others * size * (PLACE + item),
        "everything travels twice": 2 * expected,
        "one more element travels": others * (count + 1) * (PLACE + item),
        "one element fewer travels": others * (count - 1) * (PLACE + item),
        "all ranks together send k elements": others * max(1, count // case.ranks) * (PLACE + item),
    }
    for rank, result in enumerate(results):
        for step, found in enumerate(result["sent"].tolist(), start=1):
            if found == expected:
                continue
            dense = 2 * others * size * item // case.ranks
            hint = known(ways, partial(eq, found))
            if not hint and found >= dense:
                hint = (
                    f": that is more than an all-reduce of all {size} elements needs ({dense} bytes), "
                    "so the zeros travel, too"
                )
            raise Wrong(
                f"{case.label}: rank {rank} sends {found} bytes in step {step}, expected (P - 1) k "
                f"(4 + itemsize) = {others} x {count} x {PLACE + item} = {expected}{hint}"
            )
    return {"bytes of a sparse all-reduce": float(expected)}
