"""Lesson 17, task 1: the program that asks for bytes, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from types import ModuleType
from typing import Any

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    expect,
)


def run_bytes(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1; each row is batch, heads, kv_heads, queries, keys, head_size, itemsize,
    budget.
    """
    found = []
    for b, h, kv, tq, tk, d, size, budget in given["rows"].tolist():
        longest = exercise.longest_sequences(budget, b, h, kv, d, size)
        if not isinstance(longest, tuple | list) or len(longest) != 2:
            raise Wrong(f"longest_sequences returns {longest!r}, expected a pair of whole numbers")
        row = [
            exercise.matrix_bytes(b, h, tq, tk, size),
            exercise.flash_bytes(b, h, kv, tk, d, size),
            *longest,
        ]
        for name, value in zip(
            ("matrix_bytes", "flash_bytes", *["longest_sequences"] * 2), row, strict=True
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise Wrong(
                    f"{name} returns {value!r} of type {type(value).__name__}, expected a whole "
                    "number, an int"
                )
        found.append(row)
    return {"found": found}


def judge_bytes(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Count."""
    for row, found in zip(
        case.given[0]["rows"].tolist(), results[0]["found"].tolist(), strict=True
    ):
        b, h, kv, tq, tk, d, size, budget = row
        matrix, flash = b * h * tq * tk * size, b * tk * (2 * (h + kv) * d * size + 4 * h)
        told(f"matrix_bytes({b}, {h}, {tq}, {tk}, {size})", found[0], matrix, wrong_matrices(row))
        told(
            f"flash_bytes({b}, {h}, {kv}, {tk}, {d}, {size})", found[1], flash, wrong_holdings(row)
        )
        called = f"of longest_sequences({budget}, {b}, {h}, {kv}, {d}, {size})"
        ends = longest_by(row, (h + 2 * kv) * d * size, size)
        told(
            f"the first {called}",
            found[2],
            ends,
            wrong_ends(row) | {"the two are exchanged": budget // (flash // tk)},
        )
        with_flash = {
            story: budget // (value // tk)
            for story, value in wrong_holdings(row).items()
            if not value % tk
        }
        with_flash |= {
            "T is one too long: its bytes are more than the budget": budget // (flash // tk) + 1,
            "T is one too short: what takes just the budget fits": budget // (flash // tk) - 1,
            "the two are exchanged": ends,
        }
        told(f"the second {called}", found[3], budget // (flash // tk), with_flash)


def told(what: str, found: int, expected: int, instead: dict[str, int]) -> None:
    """Raise `Wrong` unless both are the same."""
    says = f"{what} is {found:,}, expected {expected:,}"
    expect(found == expected, says, instead, found.__eq__)


def wrong_matrices(row: Sequence[int]) -> dict[str, int]:
    """Return what known mistakes give for 1a."""
    b, h, _, tq, tk, d, size, _ = row
    return {
        "the batch is forgotten": h * tq * tk * size,
        "each head has no matrix of its own": b * tq * tk * size,
        "the size of a number is forgotten": b * h * tq * tk,
        "there are as many keys as queries": b * h * tq * tq * size,
        "there are as many queries as keys": b * h * tk * tk * size,
        "the size of a head counts": b * h * tq * tk * d * size,
        "a number has 4 bytes": b * h * tq * tk * 4,
        "queries and keys are added, not multiplied": b * h * (tq + tk) * size,
        "only the half below the diagonal counts": b * h * tq * tk * size // 2,
        "scores and weights are both counted": 2 * b * h * tq * tk * size,
        "a number has itemsize bits": b * h * tq * tk * size // 8,
    }


def wrong_holdings(row: Sequence[int]) -> dict[str, int]:
    """Return what known mistakes give for 1b."""
    b, h, kv, _, tk, d, size, _ = row
    linear = 2 * (h + kv) * d * size
    return {
        "lse is forgotten": b * tk * linear,
        "lse takes as many bytes a number as the rest": b * tk * (linear + h * size),
        "lse has a number for each number of the output": b * tk * (linear + 4 * h * d),
        "the output is forgotten": b * tk * ((h + 2 * kv) * d * size + 4 * h),
        "keys and values have as many heads as queries": b * tk * (4 * h * d * size + 4 * h),
        "query and output have as few heads as keys": b * tk * (4 * kv * d * size + 4 * kv),
        "the batch is forgotten": tk * (linear + 4 * h),
        "values are forgotten": b * tk * ((2 * h + kv) * d * size + 4 * h),
        "lse has as many heads as keys have": b * tk * (linear + 4 * kv),
        "lse has one number for all heads": b * tk * (linear + 4),
        "lse has 2 bytes a number": b * tk * (linear + 2 * h),
        "query is forgotten": b * tk * ((h + 2 * kv) * d * size + 4 * h),
        "keys and values are forgotten": b * tk * (2 * h * d * size + 4 * h),
        "the size of a head is forgotten": b * tk * (2 * (h + kv) * size + 4 * h),
        "the size of a number is forgotten": b * tk * (2 * (h + kv) * d + 4 * h),
        "the heads are forgotten": b * tk * (4 * d * size + 4),
        "the largest score is held beside lse": b * tk * (linear + 8 * h),
    }


def longest_by(row: Sequence[int], linear: int, square: float) -> int:
    """Return the largest T of which b h square T² + b linear T bytes fit."""
    b, h, *_, budget = row
    a = int(b * h * square)
    return (isqrt((b * linear) ** 2 + 4 * a * budget) - b * linear) // (2 * a)


def wrong_ends(row: Sequence[int]) -> dict[str, int]:
    """Return what known mistakes give for the first of 1c."""
    _, h, kv, _, _, d, size, _ = row
    right = longest_by(row, (h + 2 * kv) * d * size, size)
    return {
        "T is one too long: its bytes are more than the budget": right + 1,
        "T is one too short: one token more fits, too": right - 1,
        "query, key and value are forgotten": longest_by(row, 0, size),
        "the output is held, too": longest_by(row, 2 * (h + kv) * d * size, size),
        "keys and values have as many heads as queries": longest_by(row, 3 * h * d * size, size),
        "two matrices are held, the scores and the weights": longest_by(
            row, (h + 2 * kv) * d * size, 2 * size
        ),
        "lse is held, too": longest_by(row, (h + 2 * kv) * d * size + 4 * h, size),
    }
