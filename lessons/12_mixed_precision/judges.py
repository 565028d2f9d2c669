"""Lesson 12, tasks 2 and 3: the judges of what the checks' programs found, in the grader's
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from minidist.course.grader.calls import expect_collectives
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
    known,
)

INTERVAL, FIRST_SCALE, HISTORY = 3, 8.0, 3


def judge_scaling(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks skip the same steps, and find the same scales, for one small all-reduce a step."""
    skipped = [
        not all(np.isfinite(given["gradients"][step]).all() for given in case.given)
        for step in range(len(case.given[0]["gradients"]))
    ]
    scales = scales_of(skipped)
    for rank, result in enumerate(results):
        expect_equal(
            rank,
            "whether to skip, at step",
            result["skipped"],
            np.array(skipped),
            instead=skips_of(case.given, rank),
        )
        instead = {clause: partial(scales_of, skipped, how) for how, clause in SCALED.items()}
        if (refused := np.flatnonzero(result["scales"] < 0)).size:
            says = (
                f"rank {rank}: update raises FloatingPointError in step {refused[0]}, where the "
                "scale is not 1"
            )
            raise Wrong(says + known(instead, partial(np.array_equal, result["scales"])))
        expect_close(rank, "the scale after step", result["scales"], scales, instead=instead)
        if (last := result["last"].tolist()) != [8.0, 2.0, 1.0, 0.0]:
            named = {0.0: "FloatingPointError", -1.0: "another error"}
            words = ", ".join(named.get(scale, f"{scale:g}") for scale in last)
            why = (
                "raised above 1"
                if last[-1] == 0 and last[-2] > 1
                else "the scale stops at 1, and only there raises"
            )
            ways = {
                "nothing is raised at 1": last if 0 not in last and min(last) == 1 else [],
                "a scale that would be smaller than 1 raises; it becomes 1, and only an "
                "overflow at 1 raises": [
                    8,
                    2,
                    0,
                ],
                "the scale is halved, whatever backoff says": [8, 4, 2, 1, 0],
                "the scale goes on below 1": last
                if 0 < min(abs(each) for each in last if each) < 1
                else [],
                "what is raised is no FloatingPointError": [8, 2, 1, -1],
                "the first overflow takes the scale to 1": [8, 1, 0],
            }
            why = known(ways, last.__eq__) or f": {why}"
            raise Wrong(
                f"rank {rank}: overflows with backoff 0.25 gave {words}, not 8, 2, 1, "
                f"FloatingPointError{why}"
            )
    expect_small(
        results, notes, len(skipped), "one all-reduce a step, however many gradients there are"
    )


def skips_of(given: Sequence[Arrays], rank: int) -> dict[str, Array]:
    """Return which steps known mistakes skip."""
    # [rank, step, element], of five arrays
    gradients = np.array([each["gradients"] for each in given])
    broken, parts = ~np.isfinite(gradients), ((0, 3), (3, 5), (5, 6), (6, 7), (7, 8))
    whole = np.stack([broken[..., a:b].all(axis=2) for a, b in parts]).any(axis=0)
    with np.errstate(all="ignore"):
        square = ~np.isfinite(np.square(gradients).sum(axis=2))
        total = ~np.isfinite(gradients.sum(axis=2))
    return {
        "a rank looks at its own gradients only": broken[rank].any(axis=1),
        "only infinity counts": np.isinf(gradients).any(axis=(0, 2)),
        "only NaN counts": np.isnan(gradients).any(axis=(0, 2)),
        "only +infinity counts": np.isposinf(gradients).any(axis=(0, 2)),
        "only the last gradient is looked at": broken[..., 7].any(axis=0),
        "only the first gradient is looked at": broken[..., :3].any(axis=(0, 2)),
        "only the first element of each gradient is looked at": broken[..., [0, 3, 5, 6, 7]].any(
            axis=(0, 2)
        ),
        "all elements of a gradient have to be infinite or NaN": whole.any(axis=0),
        "all ranks have to overflow": broken.any(axis=2).all(axis=0),
        "the sum of squares overflows in float16, and no element does": square.any(axis=0),
        "the sum of the elements overflows in float16, and no element does": total.any(axis=0),
        "what is told is whether all is finite": ~broken.any(axis=(0, 2)),
        "no step overflows": np.zeros(gradients.shape[1], bool),
    }


SCALED = {
    "on": "good steps are counted on after an overflow",
    "late": "the scale grows a step too late",
    "early": "the scale grows a step too early",
    "again": "the good steps before a growth count again",
    "once": "good steps are not counted anew after a growth, so the scale grows once until the next "
    "overflow",
    "stays": "an overflow leaves the scale as it is",
    "every step": "the scale grows in every step without overflow",
    "never": "the scale never grows",
    "divides": "the scale is divided by backoff, which makes it larger",
    "to one": "an overflow takes the scale to 1",
    "all steps": "every interval-th step grows, counted from the first step and not from the last change",
}


def scales_of(skipped: Sequence[bool], how: str = "") -> Array:
    """Return the scale after each step, -1 where an overflow at 1 is refused; `how` is one of
    `SCALED`.
    """
    scale, good, scales = FIRST_SCALE, 0, []
    interval = INTERVAL + {"late": 1, "early": -1, "every step": 1 - INTERVAL, "never": 99}.get(
        how, 0
    )
    for step, overflow in enumerate(skipped, start=1):
        good = (good if how == "on" else 0) if overflow else good + 1
        grows = good == interval if how == "once" else good >= interval
        grows = step % interval == 0 if how == "all steps" else grows
        refused = overflow and scale <= 1
        if overflow:
            scale = (
                1.0
                if how == "to one"
                else max(1.0, scale * {"stays": 1, "divides": 2}.get(how, 0.5))
            )
        elif grows:
            scale *= 2
            good = good if how in ("again", "once") else 0
        scales.append(-1.0 if refused else scale)
    return np.array(scales)


def expect_small(results: Sequence[Arrays], notes: Sequence[Note], times: int, rule: str) -> None:
    """Raise `Wrong` unless what was sent is so many all-reduces of one number."""
    expect_collectives(notes)
    sent = [note for note in notes if note.kind == "send"]
    if large := next((note for note in sent if note.bytes > 8), None):
        raise Wrong(
            f"rank {large.rank} sent {large.bytes} bytes ({large.line}), expected one number at a "
            "time"
        )
    for rank, result in enumerate(results):
        if len(results) > 1 and (found := int(result["calls"])) != times:
            raise Wrong(f"rank {rank} calls {found} collectives, expected {times}: {rule}")


def descended(given: Arrays, how: str = "") -> tuple[Array, Array]:
    """Return the norms and the masters in float64; `how` is what goes wrong."""
    masters, norms, scale = given["weights"].astype(np.float64), [], float(given["scale"])
    for gradient in given["gradients"]:
        wide = gradient.astype(np.float64) / scale
        if how == "in float16":
            with np.errstate(over="ignore"):
                wide = (gradient / np.float16(scale)).astype(np.float64)
        elif how == "multiplies":
            wide = wide * scale * scale
        parts = [float(np.linalg.norm(part)) for part in (wide[:3], wide[3:])]
        norm = {"sum of norms": sum(parts), "largest norm": max(parts)}.get(
            how, float(np.linalg.norm(wide))
        )
        norm = {
            "no root": norm**2,
            "rms": norm / len(wide) ** 0.5,
            "largest": float(np.abs(wide).max()),
        }.get(how, norm)
        norm = {
            "mean": norm / 2**0.5,
            "sum of elements": float(np.abs(wide).sum()),
            "rms of parts": (parts[0] ** 2 / 3 + parts[1] ** 2 / 4) ** 0.5,
        }.get(how, norm)
        factor = min(1.0, 5 / norm) if norm else 1.0
        if how == "clips what is scaled":
            factor = min(1.0, 5 / np.linalg.norm(wide * scale))
        elif how == "clips each alone":
            factor = np.repeat([min(1, 5 / part) for part in parts], (3, 4))
        elif how == "does not clip":
            factor = 1.0
        elif how == "clips each element":
            factor, wide = 1.0, np.clip(wide, -5, 5)
        elif how == "always to the limit":
            factor = 5 / norm
        elif how in ("wrong way", "factor is the limit", "leaves out large ones"):
            too_large = {
                "wrong way": norm / 5,
                "factor is the limit": 5.0,
                "leaves out large ones": 0.0,
            }[how]
            factor = too_large if norm > 5 else 1.0
        elif how == "clips the others":
            factor = 5 / norm if norm < 5 else 1.0
        elif how == "first alone is clipped":
            factor = np.repeat([factor, 1.0], (3, 4))
        step = float(given["rate"]) * wide * factor
        step *= {
            "uphill": -1,
            "no rate": 1 / float(given["rate"]),
            "scaled step": scale,
            "twice": 2,
        }.get(how, 1)
        masters = (
            masters.astype(np.float16).astype(np.float64) if how == "from weights" else masters
        ) - step
        if how:  # what goes wrong is told from what float32 makes of it
            masters = masters.astype(np.float16 if how == "rounds" else np.float32).astype(
                np.float64
            )
        norms.append(
            norm
            * (factor if how == "the clipped norm" else 1)
            * (scale if how == "the scaled norm" else 1)
        )
    return np.array(norms), masters


DESCENTS = {
    "in float16": "gradients are unscaled in float16",
    "clips what is scaled": "the norm is compared with the limit before unscaling",
    "clips each alone": "each gradient is clipped by its own norm",
    "does not clip": "nothing is clipped",
    "clips each element": "each element is cut off at the limit: all are scaled by one factor",
    "rounds": "the masters are rounded to float16 at each step",
    "from weights": "each step begins from the rounded weights, not from the masters",
    "the clipped norm": "the norm is that after clipping",
    "the scaled norm": "the norm is that of the scaled gradients",
    "sum of norms": "the norms of the gradients are added, not their squares",
    "largest norm": "it is the norm of one gradient, the largest, and not that of all together",
    "no root": "the root of the sum of squares is not taken",
    "rms": "squares are averaged, not added",
    "rms of parts": "the squares of a gradient are averaged, not added",
    "largest": "it is the largest element, not the norm",
    "mean": "the squares of the gradients' norms are averaged, not added",
    "sum of elements": "magnitudes are added, not squares",
    "always to the limit": "gradients are scaled to the limit also where their norm is smaller",
    "wrong way": "a norm that is too large multiplies by norm/limit, which makes it larger",
    "factor is the limit": "a norm that is too large multiplies by the limit, not by limit/norm",
    "leaves out large ones": "a step whose norm is too large is left out; it is to be scaled",
    "clips the others": "gradients are scaled where their norm is smaller than the limit, not where it is larger",
    "first alone is clipped": "only the first gradient is clipped",
    "multiplies": "gradients are multiplied by the scale; to unscale is to divide",
    "uphill": "the gradient is added, not subtracted",
    "no rate": "the learning rate is forgotten",
    "scaled step": "the step is that of the scaled gradients",
    "twice": "each step is taken twice",
}


def wrongly(given: Arrays, how: str, which: int) -> Array:
    """Return the norms, or what masters moved by, if something goes wrong."""
    return descended(given, how)[which] - (given["weights"] if which else 0)


def judge_descending(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Masters follow float64; weights are the masters, rounded."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        norms, masters = descended(given)
        expect_close(
            rank,
            "the norm at step",
            result["norms"],
            norms,
            1e-5,
            instead={clause: partial(wrongly, given, how, 0) for how, clause in DESCENTS.items()},
        )
        if (changed := int(result["changed"])) >= 0:
            says = f"rank {rank}: step {changed} changes the gradients that it is given"
            raise Wrong(f"{says}: they belong to the caller, so unscale and clip copies of them")
        if result["masters"].dtype != np.float32:
            raise Wrong(f"rank {rank}: the masters are {result['masters'].dtype}, expected float32")
        expect_close(
            rank,
            "what masters moved by",
            result["masters"] - given["weights"],
            masters - given["weights"],
            1e-3,
            instead={clause: partial(wrongly, given, how, 1) for how, clause in DESCENTS.items()},
        )
        instead = {"the model's own weights are left as they were": given["weights"]}
        expect_equal(
            rank, "weight", result["weights"], result["masters"].astype(np.float16), instead=instead
        )
