"""Lesson 12, tasks 4 and 5: the judges of float8, and of its delayed scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from judges import HISTORY, expect_small

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_equal, known


def judge_quantizing(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The numbers are torch's, after saturation; the scales are the largest powers of two that
    fit.
    """
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        expected = in_float8(given["x"])
        for scale in (1.0, 64.0, 0.125):
            answer = result[f"by {scale:g}"]
            if answer.shape != expected.shape or answer.dtype != np.float32:
                raise Wrong(
                    f"rank {rank}: quantize returns {answer.dtype} {answer.shape}, not "
                    f"float32 {expected.shape}"
                )
            for x, found, right in zip(given["x"], answer, expected, strict=True):
                if found != right:
                    says = (
                        f"rank {rank}: {x / scale:.9g} by {scale:g} became {found:.9g}, expected "
                        f"{right:.9g}"
                    )
                    every = np.concatenate([result[f"by {each:g}"] for each in (1.0, 64.0, 0.125)])
                    ways = {
                        clause: partial(misquantized, given["x"], how)
                        for how, clause in QUANTIZED.items()
                    }
                    why = known(ways, lambda value: np.array_equal(every, value, equal_nan=True))  # noqa: B023
                    raise Wrong(says + (why or misfit(float(x), float(found), float(right))))
        amaxes, answers = given["amaxes"].astype(np.float64), result["scales"]
        for amax, found in zip(amaxes, answers, strict=True):
            right = largest_scale(amax)
            if found != right:
                says = f"rank {rank}: scale_for({amax:.9g}) is {found:.9g}, expected {right:.9g}"
                why = known(misscales(amaxes), lambda value: np.allclose(answers, value, 1e-6, 0))  # noqa: B023
                raise Wrong(says + (why or misscaled(float(amax), float(found), right)))


QUANTIZED = {
    "m2": "there are 2 bits of mantissa, as in E5M2, not 3",
    "m4": "there are 4 bits of mantissa, not 3",
    "deep": "the smallest exponent is -7, not -6, so the steps get too fine",
    "deeper": "the steps get finer below 2^-6, where there are the multiples of 2^-9 alone",
    "early": "the smallest exponent is -5, not -6, so the steps are too coarse",
    "flush": "what is below 2^-6 becomes 0; there are the multiples of 2^-9",
    "floor": "numbers are rounded down, towards -infinity, not to the nearest",
    "ceil": "numbers are rounded up, not to the nearest",
    "cut": "numbers are cut off, towards 0, not rounded to the nearest",
    "half away": "of two that are equally near the larger is taken, not the one with the even m",
    "half up": "of two that are equally near the upper is taken, not the one with the even m",
    "240": "the largest number is 240, which is that of another format; it is 448",
    "480": "the largest number is 480; (1 + 7/8) 2^8 stands for NaN, and 448 is the largest",
    "256": "the largest number is 256; it is 448 = (1 + 6/8) 2^8",
    "unlimited": "numbers beyond 448 are not held back",
    "above alone": "numbers below -448 are not held back, only those above 448",
    "no scale": "the scale is forgotten",
    "divides": "x is divided by the scale, not multiplied by it",
    "back": "the result is divided by the scale again; it is to be the number of E4M3 itself",
    "not rounded": "nothing is rounded",
    "no sign": "the sign is lost",
}


def misquantized(x: Array, how: str) -> Array:
    """Return what a mistake makes of `x`, given by all three scales; `how` is one of
    `QUANTIZED`.
    """
    found = []
    for scale in (1.0, 64.0, 0.125):
        given = x.astype(np.float64)
        given = given / scale if how in ("no scale", "divides") else given
        given = given / scale if how == "divides" else given
        exponent = np.maximum(
            np.frexp(given)[1] - 1, {"deep": -7, "deeper": -99, "early": -5}.get(how, -6)
        )
        step = np.ldexp(1.0, exponent - {"m2": 2, "m4": 4}.get(how, 3))
        part = given / step
        rounded = {
            "floor": np.floor(part),
            "ceil": np.ceil(part),
            "cut": np.trunc(part),
            "half away": np.copysign(np.floor(np.abs(part) + 0.5), part),
            "half up": np.floor(part + 0.5),
            "not rounded": part,
        }.get(how, np.rint(part)) * step
        most = {"240": 240, "480": 480, "256": 256, "unlimited": np.inf}.get(how, 448)
        rounded = np.clip(rounded, -np.inf if how == "above alone" else -most, most)
        rounded = np.where((np.abs(given) < 2**-6) & (how == "flush"), 0, rounded)
        rounded = np.abs(rounded) if how == "no sign" else rounded
        found.append((rounded / scale if how == "back" else rounded).astype(np.float32))
    return np.concatenate(found)


def misscales(amaxes: Array) -> dict[str, Array]:
    """Return the scales that known mistakes give."""
    right, power = np.array([largest_scale(amax) for amax in amaxes]), np.log2(448 / amaxes)
    return {
        "it is 448/amax itself; a power of two is wanted": 448 / amaxes,
        "it is amax/448, which is to be divided by": amaxes / 448,
        "the largest power of two below 448 is taken for 448": np.exp2(
            np.floor(np.log2(256 / amaxes))
        ),
        "the largest number is taken to be 240; that of E4M3 is 448": np.exp2(
            np.floor(np.log2(240 / amaxes))
        ),
        "the largest number is taken to be 480; that of E4M3 is 448": np.exp2(
            np.floor(np.log2(480 / amaxes))
        ),
        "it is rounded up to a power of two; amax times that is more than 448": np.exp2(
            np.ceil(power)
        ),
        "it is the nearest power of two, which may be too large": np.exp2(np.rint(power)),
        "it has to bring amax below 448; 448 itself is a number of E4M3": np.exp2(
            np.ceil(power) - 1
        ),
        "it never grows beyond 1": np.minimum(right, 1),
        "it is half of the largest": right / 2,
        "it is twice the largest": right * 2,
    }


def misscaled(amax: float, found: float, right: float) -> str:
    """Return which rule a scale breaks, in words that go behind the rejection, or nothing."""
    if np.frexp(found)[0] != 0.5:
        return ": that is not a power of two"
    if found * amax > 448:
        return f": {amax:.9g} times that is more than 448"
    return (
        ": 448 itself is a number of E4M3"
        if right * amax == 448
        else f": {amax:.9g} times twice that is still below"
    )


def misfit(x: float, found: float, right: float) -> str:
    """Return which rule a number of float8 breaks, in words that go behind the rejection, or
    nothing.
    """
    if not abs(found) <= 448:
        return ": E4M3 has no number beyond 448, so that is what is taken"
    if abs(x) < 2**-6 and found * 2**9 % 1:
        return ": below 2^-6 there are the multiples of 2^-9 alone, the steps get no finer"
    if abs(found - x) == abs(right - x):
        return ": both are equally near, and the other one has the even m"
    if abs(x) < 2**-6 and not found:
        return ": below 2^-6 there are the multiples of 2^-9, not zero alone"
    return ": it is cut off, not rounded to the nearest" if abs(found) < abs(x) else ""


def largest_scale(amax: float) -> float:
    """Return the scale of task 4."""
    return float(np.exp2(np.floor(np.log2(448 / amax))))


def judge_delayed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every scale goes by the past of all ranks, and only updates send."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        scales = scales_by(case.given, rank)
        instead = {
            clause: partial(scales_by, case.given, rank, how) for how, clause in SLIPS.items()
        }
        expect_equal(rank, "the scale by step and cast", result["scales"], scales, instead=instead)
        for step, cast in np.ndindex(scales.shape):
            x8 = in_float8(given["x"][step, cast] * np.float32(scales[step, cast]))
            scale, x = np.float32(scales[step, cast]), given["x"][step, cast]
            instead = {
                "nothing is rounded": x * scale,
                "the numbers are divided by the scale again": x8 / scale,
                "x is returned as it was": x,
                "x is not scaled before it is rounded": in_float8(x),
                "x is divided by the scale, not multiplied": in_float8(x / scale),
            }
            expect_equal(
                rank, f"cast {cast} in step {step}", result["x8"][step, cast], x8, instead=instead
            )
        sent = [note for note in notes if note.rank == rank and note.kind in ("send", "barrier")]
        for before, after in result["marks"].reshape(-1, 2):
            if sent[before:after]:
                raise Wrong(
                    f"rank {rank} sent a message in cast ({sent[before].line}): that is what "
                    "delay is to avoid"
                )
    expect_small(results, notes, 8, "one all-reduce in each update")


SLIPS = {
    "too late": "the oldest amax leaves a step too late",
    "too early": "the oldest amax leaves a step too early",
    "never": "no amax ever leaves, or that of the casts is not set back at the end of a step",
    "mean": "the mean of the last steps' amaxes is taken, not the largest of them",
    "last": "only the last cast of a step is remembered",
    "first": "only the first cast of a step is remembered",
    "alone": "a rank goes by its own past alone",
    "present too": "the present x takes part in its own scale",
    "present": "the scale goes by the present x alone",
    "all casts": "before the first update the scale goes by all casts so far",
    "latest": "the last step alone counts, not the last `history` of them",
    "oldest": "the oldest step of the history alone counts",
    "least": "the smallest amax of the history is taken, not the largest",
    "sum": "the amaxes of the ranks are added, not the largest taken",
    "least rank": "the smallest amax of the ranks is taken, not the largest",
    "own and sum": "the amaxes of the casts are added, not the largest taken",
    "no magnitude": "the largest value is taken, not the largest magnitude",
    "everyone first": "before the first update the scale goes by all ranks; it is this rank's own amax then",
    "one first": "before the first update the scale is 1",
    "448 first": "before the first update the scale is 448",
    "inverse": "what is returned is one over the scale",
    "least cast": "the smallest amax of the casts is remembered, not the largest",
}


def scales_by(given: Sequence[Arrays], rank: int, how: str = "") -> Array:
    """Return a rank's scale of each cast in each step [step, cast]; `how` is one of `SLIPS`."""
    values = np.array([each["x"] for each in given]).astype(np.float64)
    own = (values if how == "no magnitude" else np.abs(values)).max(axis=-1)  # [rank, step, cast]
    counted = {"last": own[:, :, -1:], "first": own[:, :, :1]}.get(how, own).max(axis=2)
    counted = {"own and sum": own.sum(axis=2), "least cast": own.min(axis=2)}.get(how, counted)
    entered = counted[rank] if how == "alone" else counted.max(axis=0)  # [step]
    entered = {"sum": counted.sum(axis=0), "least rank": counted.min(axis=0)}.get(how, entered)
    history = HISTORY + {"too late": 1, "too early": -1, "never": 99, "latest": 1 - HISTORY}.get(
        how, 0
    )
    amaxes = np.maximum.accumulate(own[rank], axis=1) if how == "all casts" else own[rank].copy()
    amaxes = own.max(axis=0) if how == "everyone first" else amaxes
    for step in range(1, len(amaxes)):
        window = entered[max(0, step - history) : step]
        past = {"mean": window.mean(), "oldest": window[0], "least": window.min()}.get(
            how, window.max()
        )
        amaxes[step] = {
            "present too": np.maximum(past, own[rank, step]),
            "present": own[rank, step],
        }.get(how, past)
    scales = np.vectorize(largest_scale)(np.abs(amaxes))
    scales[0] = {"one first": 1.0, "448 first": 448.0}.get(how, scales[0])
    return 1 / scales if how == "inverse" else scales


def in_float8(x: Array) -> Array:
    """Return the nearest numbers of E4M3, as float32."""
    return torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
