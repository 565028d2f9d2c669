"""Lesson 12, task 1: the judges of rounding, to the nearest and at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    known,
)

DRAWS = 4000  # roundings of each number at random

# of a number that is a bfloat16 already, and is not to be moved once in 65,536 times
COPIES = 1_000_000
CLOSE = 0x80  # and of a number that lies so many 65,536ths beyond it


def judge_nearest(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The bits are torch's; of what is no number any will do."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        x = torch.tensor(given["bits"].view(np.float32))
        expected, found = x.bfloat16().view(torch.int16).numpy().view(np.uint16), result["bits"]
        if found.dtype != np.uint16 or found.shape != expected.shape:
            raise Wrong(
                f"rank {rank}: bits of {found.dtype} {found.shape}, expected uint16 "
                f"{expected.shape}"
            )
        nan = x.isnan().numpy()
        instead = roundings(given["bits"], expected)
        for at in np.flatnonzero(np.where(nan, (found & 0x7FFF) <= 0x7F80, found != expected)):
            says = (
                f"float32 {given['bits'][at]:#010x} ({x[at]:.9g}) became {found[at]:#06x}, expected"
            )
            if nan[at]:
                became = (
                    "0"
                    if not found[at] & 0x7FFF
                    else "infinity"
                    if found[at] & 0x7FFF == 0x7F80
                    else "a number"
                )
                raise Wrong(
                    f"{says} one that is not a number, and not {became}: perhaps only its lower "
                    "bits say so"
                )
            why = known(instead, lambda bits: np.array_equal(found[~nan], bits[~nan]))  # noqa: B023
            raise Wrong(f"{says} {expected[at]:#06x}{why}")


def roundings(bits: Array, expected: Array) -> dict[str, Array]:
    """Return what known mistakes make of float32, given as bits."""
    wide, upper, finite = bits.astype(np.uint64), bits >> 16, np.isfinite(bits.view(np.float32))
    with np.errstate(all="ignore"):
        half = bits.view(np.float32).astype(np.float16).view(np.uint16)
    return {
        "the lower half is cut off": upper,
        "of two that are equally near the upper is taken": (wide + 0x8000) >> 16,
        "of two that are equally near the lower is taken": (wide + 0x7FFF) >> 16,
        "of two that are equally near the one is taken whose last bit is 1": (
            wide + 0x8000 - (upper & 1)
        )
        >> 16,
        "what is between two bfloat16 always goes up": (wide + 0xFFFF) >> 16,
        "the next bfloat16 is always taken": (wide + 0x10000) >> 16,
        "the lower half is kept, and the upper one is cut off": bits & 0xFFFF,
        "they are the bits of a float16; a bfloat16 has 8 bits of exponent": half,
        "what rounds up beyond the largest bfloat16 stays at it": np.where(
            finite & (expected & 0x7FFF == 0x7F80), expected - 1, expected
        ),
        "subnormal numbers become 0": np.where(bits & 0x7F800000, expected, expected & 0x8000),
        "the sign is lost": expected & 0x7FFF,
        "-0 becomes 0": np.where(expected == 0x8000, 0, expected),
    }


def judge_random(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each result is a neighbour, and as many are the upper one as there should be, within five
    deviations.
    """
    for given, result in zip(case.given, results, strict=True):
        bits = result["bits"].astype(np.uint32).reshape(len(given["x"]), DRAWS)
        x = given["x"].astype(np.float32)
        # below: towards zero
        below, parts = x.view(np.uint32) >> 16, (x.view(np.uint32) & 0xFFFF) / 65536
        for which in np.flatnonzero(
            (bits == bits[:, :1]).all(axis=1) & (parts > 0.01) & (parts < 0.99)
        ):
            words = f"all {DRAWS} elements that were {x[which]:.9g} became {bits[which, 0]:#06x}"
            rule = "draw one number for each element, and not one for all, or none"
            if np.array_equal(result["bits"], result["second"]):
                rule = "nothing is drawn, or the noise is far too small; it goes from 0 to 0xFFFF"
            elif not (bits == bits[:, :1]).all():  # others did not all go one way
                rule = (
                    f"it lies {parts[which]:.3f} of the way up, and the noise, from 0 to 0xFFFF, "
                    "has to reach as far"
                )
            raise Wrong(f"{words}: {rule}")
        if np.array_equal(result["bits"], result["second"]):
            raise Wrong(
                "a second call with the same generator draws the numbers of the first: it is "
                "seeded anew"
            )
        if not np.array_equal(result["bits"], result["again"]):
            raise Wrong(
                "a generator of the same seed gives other numbers: draw from `random` and nothing "
                "else"
            )
        if result["exact"].tolist() != [int(np.float32(given["x"][0]).view(np.uint32)) >> 16]:
            words = f"of {COPIES} times {given['x'][0]:g}, a bfloat16, some became another"
            inexact = parts > 0
            found, more = (bits != below[:, None]).mean(axis=1)[inexact], parts[inexact]
            ways = {
                "it goes up half of the time, wherever the number lies": np.full(len(more), 0.5),
                "the chances of up and down are exchanged": 1 - more,
                "noise is added, and then the sum is rounded to the nearest, not cut off": np.clip(
                    more + 0.5, 0, 2
                ),
            }
            near = known(ways, lambda part: np.abs(found - np.minimum(part, 1)).max() < 0.05)  # noqa: B023
            raise Wrong(words + (near or ": the noise is too large, it ends at 0xFFFF"))
        kinds, up = result["close"].tolist()
        part = CLOSE / 65536
        if kinds > 2 or abs(up - COPIES * part) > 6 * (COPIES * part) ** 0.5:
            raise Wrong(
                f"of {COPIES} times a number that lies {part:.4f} of the way up, {up} went up, "
                f"expected about {COPIES * part:.0f}: the noise has to have all values from 0 to "
                "0xFFFF, and not only some"
            )
        for each, row, lower, part in zip(x, bits, below.tolist(), parts, strict=True):
            if astray := set(np.unique(row).tolist()) - {lower, lower + (part > 0)}:
                raise Wrong(
                    f"{each:.9g} became {astray.pop():#06x}: its neighbours are {lower:#06x} and "
                    "the one after"
                )
        found, deviations = (
            (bits != below[:, None]).mean(axis=1),
            (parts * (1 - parts) / DRAWS) ** 0.5,
        )
        for which in np.flatnonzero(np.abs(found - parts) > 5 * deviations):
            instead = {
                "it goes up half of the time, wherever the number lies": 0.5 * (parts > 0),
                "the chances of up and down are exchanged": 1 - parts,
            }
            says = f"{x[which]:.9g} was rounded away from zero in a part of {found[which]:.3f}"
            why = known(instead, lambda value: np.abs(found - value)[parts > 0].max() < 0.05)  # noqa: B023
            raise Wrong(f"{says}, expected {parts[which]:.3f}{why}")
