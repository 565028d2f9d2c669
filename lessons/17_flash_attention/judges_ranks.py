"""Lesson 17, task 5: the program that attends to keys on several ranks, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import QKV, attention, expect_pair, judge_lse, scores_of, seen_by, tensors
from judges_tiles import Meter

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.calls import calls, expect_collectives, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, expect_close
from minidist.full.collectives import COLLECTIVES
from minidist.full.trace import Trace


def run_ranks(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    comm.trace = trace = Trace()
    leaves = tensors(given, QKV)
    kept = contract.untouched(**dict(zip(QKV, leaves, strict=True)))
    with kept, torch.no_grad(), Meter(*leaves):
        found = expect_pair(exercise.attention_over_ranks(*leaves, comm))
    return found | {"calls": calls(trace)}


def judge_ranks(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """As attention to all keys on one rank; messages of the size of the queries."""
    everyones = {name: np.concatenate([given[name] for given in case.given], 2) for name in QKV[1:]}
    whole = {"query": case.given[0]["query"]} | everyones
    counts = [given["key"].shape[2] for given in case.given]
    seen = seen_by(whole["query"].shape[2], sum(counts), False)
    parts = [
        attention(given, seen[:, : given["key"].shape[2]])
        for given in case.given
        if given["key"].shape[2]
    ]
    outputs, lses = (
        np.array([part[0] for part in parts]),
        np.array([part[1] for part in parts])[..., None],
    )
    expected, lse = attention(whole, seen)
    by_keys = np.array([n for n in counts if n])[:, None, None, None, None]
    with np.errstate(all="ignore"):
        instead: dict[str, Any] = {
            "the ranks' outputs are averaged: the weight of each is exp(lse - lse of all)": outputs.mean(
                0
            ),
            "the ranks' outputs are averaged over all ranks, those without keys, too": outputs.sum(
                0
            )
            / case.ranks,
            "the ranks' outputs are added": outputs.sum(0),
            "a rank's weight is its number of keys: it is exp(lse - lse of all)": (
                outputs * by_keys
            ).sum(0)
            / sum(counts),
            "the ranks' outputs are added, and the sum is divided by that of the weights": (
                outputs.sum(0) / np.exp(lses - lses.max(0)).sum(0)
            ),
            "a rank's weight is its lse, not exp(lse)": (outputs * lses).sum(0) / lses.sum(0),
            "the sum is not divided by the sum of the weights": (
                outputs * np.exp(lses - lses.max(0))
            ).sum(0),
            "the ranks' numerators are added without being brought to one largest score": numerators(
                case, outputs, lses
            ),
        }
        if none := counts.count(0):
            empty = none * np.exp(-lses.max(0))
            total = np.exp(lses - lses.max(0)).sum(0) + empty
            story = "lse is 0, not -inf, on a rank without keys, so it has a weight"
            instead[story] = (outputs * np.exp(lses - lses.max(0))).sum(0) / total
        logs = {
            "the ranks' lse are added": lses.sum(0)[..., 0],
            "it is the largest lse of a rank": lses.max(0)[..., 0],
            "it is the mean of the ranks' lse": lses.mean(0)[..., 0],
            "the largest lse is not added to the logarithm": lse - lses.max(0)[..., 0],
        }
    for rank, found in enumerate(results):
        mine = np.zeros_like(expected)
        if counts[rank]:
            mine, own = attention(case.given[rank], seen[:, : counts[rank]])
            logs = {"it is that of this rank's keys alone": own} | logs
            top = lses.max(0)[..., 0]
            logs["this rank's own lse is added to the logarithm, not the largest of all ranks"] = (
                own + lse - top
            )
            with np.errstate(all="ignore"):
                instead["the sum is divided by this rank's own weight, not by that of all"] = (
                    expected * np.exp(lse - own)[..., None]
                )
        if not np.isfinite(found["output"]).all():
            none = [other for other, keys in enumerate(counts) if not keys]
            why = "exp of a large lse overflows: subtract the largest lse of all ranks first"
            why = (
                f"ranks {none} have no keys: lse is -inf there, the output 0 and not 0/0"
                if none
                else why
            )
            raise Wrong(f"rank {rank}: the output is infinite or not a number in places: {why}")
        alone = {"this rank's keys count only": mine}
        expect_close(rank, "the output", found["output"], expected, instead=alone | instead)
        if np.shape(found["lse"]) == lse.shape:
            expect_close(rank, "lse", found["lse"], lse, instead=logs)
        judge_lse(found["lse"], whole, seen, rank)
    numbers = expected[..., 0].size * (expected.shape[-1] + 2)
    for rank, found in enumerate(results):
        rows = found["calls"].reshape(-1, 2).astype(int)
        if {COLLECTIVES[row[0]] for row in rows} - {"all_reduce"} or rows[:, 1].sum() > 8 * numbers:
            raise Wrong(
                f"rank {rank} calls {spelled(rows)}: expected all_reduces of at most "
                f"{8 * numbers} bytes together, a maximum and a sum for each query, and a "
                "weighted sum of the size of the output"
            )
    expect_collectives(notes)
    return {"bytes of all-reduces": 8 * numbers}


def numerators(case: Case, outputs: Array, lses: Array) -> Array:
    """Return the output if each rank's sums are relative to its own largest score, and added so."""
    given = [each for each in case.given if each["key"].shape[2]]
    seen = [seen_by(each["query"].shape[2], each["key"].shape[2], False) for each in given]
    own = np.array(
        [
            scores_of(each, mask).max(-1, keepdims=True)
            for each, mask in zip(given, seen, strict=True)
        ]
    )
    totals = np.exp(lses - own)
    return np.asarray((outputs * totals).sum(0) / totals.sum(0))
