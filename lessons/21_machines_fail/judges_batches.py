"""Lesson 21, task 3: the judge of batches that stay, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, known

Parts = list[tuple[list[int], float]]  # (samples, weight) of each microbatch


def cut(rows: Array, count: int) -> list[Array]:
    """Cut rows as numpy does."""
    return list(np.array_split(rows, count))


def parts_of(
    orders: Array, step: int, batch: int, largest: int, ranks: int, rank: int, how: str = ""
) -> Parts:
    """Return a rank's microbatches of a step; `how` is one of `SLIPS`."""
    size = orders.shape[1]
    batch = batch * ranks if how == "grows" else batch
    full = max(1, size // batch) if how in ("drops", "short joins") else -(-size // batch)
    epoch, number = divmod(step, full)
    start = number * batch
    if how == "runs on":
        endless = np.concatenate([*orders, orders[-1], orders[-1]])
        whole = endless[step * batch : (step + 1) * batch]
    elif how == "epoch by samples":
        epoch = step * batch // size
        start = step * batch % size
        whole = orders[epoch % len(orders)][start : start + batch]
    elif how == "begins anew":
        whole = orders[0][start : start + batch]
    elif how == "repeats":
        order = orders[epoch % len(orders)]
        whole = np.concatenate([order, order])[start : start + batch]
    else:
        order = orders[epoch % len(orders)]
        last = how == "short joins" and number == full - 1
        whole = order[start:] if last else order[start : start + batch]
    shares = cut(whole, ranks)
    if how == "strided":
        shares = [whole[each::ranks] for each in range(ranks)]
    elif how in ("rounded up", "rounded down"):
        each = -(-len(whole) // ranks) if how == "rounded up" else len(whole) // ranks
        shares = [whole[at * each : (at + 1) * each] for at in range(ranks)]
        if how == "rounded down":
            shares[-1] = whole[(ranks - 1) * each :]
    elif how == "whole":
        shares = [whole] * ranks
    mine = shares[rank]
    longest = max(map(len, shares))
    count = {
        "own count": -(-len(mine) // largest),
        "of a full batch": ceil(ceil(batch / ranks) / largest),
        "rounded down count": max(1, longest // largest),
        "one more": longest // largest + 1,
        "one": 1,
        "of the whole": -(-len(whole) // largest),
        "each alone": longest,
    }.get(how, -(-longest // largest))
    parts = cut(mine, count) if count else []
    if how == "full ones first":
        parts = [mine[at * largest : (at + 1) * largest] for at in range(count)]
    elif how == "strided parts":
        parts = [mine[at::count] for at in range(count)]
    elif how == "leaves out empty":
        parts = [part for part in parts if len(part)]
    weights = {
        "mean of means": lambda part: 1 / (count * ranks),
        "mean of ranks": lambda part: len(part) / max(1, len(mine)) / ranks,
        "one over count": lambda part: 1 / count,
        "of its share": lambda part: len(part) / max(1, len(mine)),
        "of a full batch's size": lambda part: len(part) / batch,
        "one over all": lambda part: 1 / len(whole),
        "unweighted": lambda part: 1.0,
        "counts": lambda part: float(len(part)),
        "of largest": lambda part: len(part) / (largest * count * ranks),
    }
    weight = weights.get(how, lambda part: len(part) / len(whole))
    return [(part.tolist(), float(weight(part))) for part in parts]


SLIPS = {
    "grows": "a global batch has `batch` samples on each rank: it grows with the ranks",
    "drops": "the last batch of an epoch is left out if it is shorter",
    "short joins": "what is left of an epoch joins the batch before it",
    "runs on": "a batch at the end of an epoch goes on with samples of the next",
    "epoch by samples": "the epoch is step * batch // samples: the last batch is shorter, so steps "
    "are to be counted",
    "begins anew": "every epoch has the order of epoch 0",
    "repeats": "a short last batch is filled with samples of the same epoch",
    "strided": "a rank takes every ranks-th sample, not a contiguous share",
    "rounded up": "shares are rounded up, so the last ranks have less, or nothing",
    "rounded down": "shares are rounded down, and the last rank has the rest",
    "whole": "every rank has the whole batch",
    "own count": "a rank counts microbatches by its own share: ranks disagree on their number",
    "of a full batch": "microbatches are counted for a full batch, also where it is shorter",
    "rounded down count": "the number of microbatches is rounded down, so some are too large",
    "one more": "there is one microbatch too many if `largest` divides the share",
    "one": "the share is not cut",
    "of the whole": "microbatches are counted for the whole batch, not for a rank's share",
    "each alone": "each sample is a microbatch of its own",
    "full ones first": "all microbatches but the last ones have `largest` samples; array_split makes "
    "them alike",
    "strided parts": "a microbatch takes every n-th sample of the share",
    "leaves out empty": "empty microbatches are left out: ranks disagree on their number",
    "mean of means": "all microbatches weigh the same, though they differ in size",
    "mean of ranks": "all ranks weigh the same, though their shares differ in size",
    "one over count": "the weights add up to 1 on each rank, not over all ranks",
    "of its share": "a microbatch is weighed in its rank's share, not in the global batch",
    "of a full batch's size": "a short last batch is divided by `batch`, not by its own size",
    "one over all": "each microbatch weighs as one sample",
    "unweighted": "every microbatch weighs 1",
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
        raise Wrong(
            f"step {step}, batch={batch}, largest={largest}, rank {rank} of {ranks}: "
            f"{shown(mine)}, expected {shown(right)}" + known(fitting, lambda _: True)
        )


def same(found: Parts, expected: Parts) -> bool:
    """Tell whether two lists of microbatches are the same but for rounding of weights."""
    return [rows for rows, _ in found] == [rows for rows, _ in expected] and all(
        abs(mine - right) <= 1e-12 for (_, mine), (_, right) in zip(found, expected, strict=True)
    )


def shown(parts: Parts) -> str:
    """Return microbatches in words."""
    return ", ".join(f"{rows} x {weight:.4g}" for rows, weight in parts) or "no microbatch"
