"""Lesson 21, task 3: the judge of batches that stay, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import ceil

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, known

Parts = list[tuple[list[int], float]]  # (samples, weight) of each microbatch


def cut(rows: Array, count: int) -> list[Array]:
    """Cut rows as numpy does."""
    return list(np.array_split(rows, count))


def batch_of(orders: Array, step: int, batch: int, how: str = "") -> Array:
    """Return the samples of a global batch; `how` is one of `SLIPS`."""
    size = orders.shape[1]
    step += {"a step late": 1, "a step early": -1}.get(how, 0)
    full = ceil(size / batch)
    if how in ("drops", "short joins"):
        full = max(1, size // batch)
    epoch, number = divmod(step, full)
    start = number * batch
    if how == "epoch by samples":
        epoch, start = step * batch // size, step * batch % size
    order = orders[0 if how == "begins anew" else epoch % len(orders)]
    if how == "order of the step":
        order = orders[step % len(orders)]
    if how == "positions":
        order = np.arange(size)
    if how == "runs on":
        order, start = np.concatenate([*orders, orders[-1], orders[-1]]), step * batch
    if how == "repeats":
        order = np.concatenate([order, order])
    whole = order[start : start + batch]
    if how == "last ones" and number == full - 1:
        whole = order[-batch:]
    if how == "short joins" and number == full - 1:
        whole = order[start:]
    return np.sort(whole) if how == "sorted" else whole


def shares_of(whole: Array, ranks: int, how: str = "") -> list[Array]:
    """Return each rank's samples of a global batch; `how` is one of `SLIPS`."""
    up, down = ceil(len(whole) / ranks), len(whole) // ranks
    return {
        "strided": lambda: [whole[rank::ranks] for rank in range(ranks)],
        "rounded up": lambda: [whole[rank * up : (rank + 1) * up] for rank in range(ranks)],
        "rounded down": lambda: [
            whole[rank * down : (rank + 1) * down if rank + 1 < ranks else None]
            for rank in range(ranks)
        ],
        "whole": lambda: [whole] * ranks,
        "backwards": lambda: cut(whole, ranks)[::-1],
        "longer ones last": lambda: longer_last(whole, ranks),
    }.get(how, lambda: cut(whole, ranks))()


def longer_last(rows: Array, count: int) -> list[Array]:
    """Cut rows at n/count, 2n/count, ..., rounded down: longer parts are not the first ones."""
    ends = [len(rows) * part // count for part in range(count + 1)]
    return [rows[start:stop] for start, stop in pairwise(ends)]


def parts_of(
    orders: Array, step: int, batch: int, largest: int, ranks: int, rank: int, how: str = ""
) -> Parts:
    """Return a rank's microbatches of a step; `how` is one of `SLIPS`."""
    batch = batch * ranks if how == "grows" else batch
    whole = batch_of(orders, step, batch, how)
    shares = shares_of(whole, ranks, how)
    mine, longest = shares[rank], max(map(len, shares))
    count = {
        "own count": ceil(len(mine) / largest),
        "of a full batch": ceil(ceil(batch / ranks) / largest),
        "rounded down count": max(1, longest // largest),
        "of the smallest": max(1, ceil(min(map(len, shares)) / largest)),
        "one more": longest // largest + 1,
        "one": 1,
        "of the whole": ceil(len(whole) / largest),
        "each alone": longest,
        "largest many": largest,
    }.get(how, ceil(longest / largest))
    if count == 0:
        return []
    parts = {
        "full ones first": lambda: [
            mine[part * largest : (part + 1) * largest] for part in range(count)
        ],
        "strided parts": lambda: [mine[part::count] for part in range(count)],
        "leaves out empty": lambda: [part for part in cut(mine, count) if len(part)],
        "longer parts last": lambda: longer_last(mine, count),
        "microbatches first": lambda: [cut(part, ranks)[rank] for part in cut(whole, count)],
    }.get(how, lambda: cut(mine, count))()
    return [
        (part.tolist(), weight_of(len(part), count, batch, largest, shares, rank, how))
        for part in parts
    ]


def weight_of(
    size: int, count: int, batch: int, largest: int, shares: Sequence[Array], rank: int, how: str
) -> float:
    """Return the weight of a microbatch of so many samples; `how` is one of `SLIPS`."""
    ranks, mine, whole = len(shares), max(1, len(shares[rank])), sum(map(len, shares))
    if how == "whole":  # each rank has all of it
        whole //= ranks
    return {
        "mean of means": 1 / (count * ranks),
        "mean of ranks": size / mine / ranks,
        "one over count": 1 / count,
        "of its share": size / mine,
        "of a full batch's size": size / batch,
        "one over all": 1 / max(1, whole),
        "unweighted": 1.0,
        "counts": float(size),
        "of largest": size / (largest * count * ranks),
        "times ranks": size * ranks / max(1, whole),
        "empty ones weigh": size / max(1, whole) if size else 1.0,
    }.get(how, size / max(1, whole))


SLIPS = {
    "grows": "a global batch has `batch` samples on each rank: it grows with the ranks",
    "drops": "the last batch of an epoch is left out if it is shorter",
    "short joins": "what is left of an epoch joins the batch before it",
    "runs on": "a batch at the end of an epoch goes on with samples of the next",
    "epoch by samples": "the epoch is step * batch // samples: the last batch is shorter, so steps "
    "are to be counted",
    "begins anew": "every epoch has the order of epoch 0",
    "order of the step": "the step is taken for the epoch",
    "positions": "positions in the order are returned, not the samples that stand there",
    "sorted": "the samples of a batch are sorted",
    "a step late": "steps count from 1: it is the next step's batch",
    "a step early": "it is the batch of the step before",
    "repeats": "a short last batch is filled with samples of the same epoch",
    "last ones": "the last `batch` samples of an epoch are its last batch: some come twice",
    "strided": "a rank takes every ranks-th sample, not a contiguous share",
    "rounded up": "shares are rounded up, so the last ranks have less, or nothing",
    "rounded down": "shares are rounded down, and the last rank has the rest",
    "longer ones last": "shares end at n r/ranks, rounded down; array_split has longer ones first",
    "backwards": "the last rank has the first share",
    "whole": "every rank has the whole batch",
    "own count": "a rank counts microbatches by its own share: ranks disagree on their number",
    "of a full batch": "microbatches are counted for a full batch, also where it is shorter",
    "rounded down count": "the number of microbatches is rounded down, so some are too large",
    "of the smallest": "microbatches are counted for the smallest share, not for the largest",
    "one more": "there is one microbatch too many if `largest` divides the share",
    "one": "the share is not cut",
    "of the whole": "microbatches are counted for the whole batch, not for a rank's share",
    "each alone": "each sample is a microbatch of its own",
    "largest many": "`largest` is taken for the number of microbatches",
    "full ones first": "all microbatches but the last ones have `largest` samples; array_split makes "
    "them alike",
    "longer parts last": "a share is cut at n i/count, rounded down; array_split has longer parts first",
    "strided parts": "a microbatch takes every n-th sample of the share",
    "microbatches first": "the batch is cut into microbatches, and these into shares, not the other way",
    "leaves out empty": "empty microbatches are left out: ranks disagree on their number",
    "mean of means": "all microbatches weigh the same, though they differ in size",
    "mean of ranks": "all ranks weigh the same, though their shares differ in size",
    "one over count": "the weights add up to 1 on each rank, not over all ranks",
    "of its share": "a microbatch is weighed in its rank's share, not in the global batch",
    "times ranks": "weights are multiplied by the ranks, as if an average over ranks followed",
    "of a full batch's size": "a short last batch is divided by `batch`, not by its own size",
    "one over all": "each microbatch weighs as one sample",
    "unweighted": "every microbatch weighs 1",
    "empty ones weigh": "an empty microbatch weighs 1, not 0",
    "counts": "the weight is the number of samples, not their share",
    "of largest": "a microbatch is weighed as if all had `largest` samples",
}


def questions(given: Arrays) -> Iterator[tuple[int, int]]:
    """Yield the steps and ranks that are asked for."""
    ranks = int(given["asked"][2])
    for step in given["steps"].tolist():
        for rank in range(ranks):
            yield step, rank


def judge_batches(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare the microbatches of each rank in each step; what they all fit is told first."""
    given, result = case.given[0], results[0]
    batch, largest, ranks = given["asked"].tolist()
    samples, lengths = result["samples"].tolist(), result["lengths"].tolist()
    weights, counts = result["weights"].tolist(), result["counts"].tolist()
    found: list[Parts] = []
    for count in counts:
        parts = []
        for _ in range(count):
            size = lengths.pop(0)
            parts.append((samples[:size], weights.pop(0)))
            del samples[:size]
        found.append(parts)
    asked = list(questions(given))
    of = partial(parts_of, given["orders"])

    def every(how: str) -> list[Parts]:
        return [of(step, batch, largest, ranks, rank, how) for step, rank in asked]

    expected = every("")
    for (step, rank), mine, right in zip(asked, found, expected, strict=True):
        if same(mine, right):
            continue
        whole = {clause: None for how, clause in SLIPS.items() if all(map(same, found, every(how)))}
        fitting = whole or {
            clause: None
            for how, clause in SLIPS.items()
            if same(mine, of(step, batch, largest, ranks, rank, how))
        }
        if same(mine, right, 1e-6):
            fitting = {"weights are rounded to 32 bits": None}
        raise Wrong(
            f"step {step}, batch={batch}, largest={largest}, rank {rank} of {ranks}: "
            f"{shown(mine)}, expected {shown(right)}" + known(fitting, lambda _: True)
        )


def same(found: Parts, expected: Parts, tolerance: float = 1e-12) -> bool:
    """Tell whether two lists of microbatches are the same but for rounding of weights."""
    return [rows for rows, _ in found] == [rows for rows, _ in expected] and all(
        abs(mine - right) <= tolerance
        for (_, mine), (_, right) in zip(found, expected, strict=True)
    )


def shown(parts: Parts) -> str:
    """Return microbatches in words."""
    return ", ".join(f"{rows} x {weight:.4g}" for rows, weight in parts) or "no microbatch"
