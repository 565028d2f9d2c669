"""Lesson 12: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, expect_equal, known

DRAWS = 4000  # roundings of each number at random
COPIES = 1_000_000  # of a number that is a bfloat16 already, and is not to be moved once in 65,536 times
INTERVAL, FIRST_SCALE, HISTORY = 3, 8.0, 3


def judge_nearest(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The bits are torch's; of what is no number any will do."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        x = torch.tensor(given["bits"].view(np.float32))
        expected, found = x.bfloat16().view(torch.int16).numpy().view(np.uint16), result["bits"]
        if found.dtype != np.uint16 or found.shape != expected.shape:
            raise Wrong(f"rank {rank}: bits of {found.dtype} {found.shape}, expected uint16 {expected.shape}")
        nan = x.isnan().numpy()
        wide = given["bits"].astype(np.uint64)
        instead = {
            "the lower half is cut off": wide >> 16,
            "of two that are equally near the upper is taken": (wide + 0x8000) >> 16,
            "of two that are equally near the lower is taken": (wide + 0x7FFF) >> 16,
            "what rounds up beyond the largest bfloat16 stays at it": np.where(
                np.isfinite(given["bits"].view(np.float32)) & (expected & 0x7FFF == 0x7F80), expected - 1, expected
            ),
        }
        for at in np.flatnonzero(np.where(nan, (found & 0x7FFF) <= 0x7F80, found != expected)):
            says = f"float32 {given['bits'][at]:#010x} ({x[at]:.9g}) became {found[at]:#06x}, expected"
            if nan[at]:
                raise Wrong(f"{says} one that is not a number: perhaps only its lower bits say so")
            why = known(instead, lambda bits: np.array_equal(found[~nan], bits[~nan]))  # noqa: B023
            raise Wrong(f"{says} {expected[at]:#06x}{why}")


def judge_random(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each result is a neighbour, and as many are the upper one as there should be, within five deviations."""
    for given, result in zip(case.given, results, strict=True):
        bits = result["bits"].astype(np.uint32).reshape(len(given["x"]), DRAWS)
        x = given["x"].astype(np.float32)
        below, parts = x.view(np.uint32) >> 16, (x.view(np.uint32) & 0xFFFF) / 65536  # below: towards zero
        for which in np.flatnonzero((bits == bits[:, :1]).all(axis=1) & (parts > 0.01) & (parts < 0.99)):
            words = f"all {DRAWS} elements that were {x[which]:.9g} became {bits[which, 0]:#06x}"
            raise Wrong(f"{words}: draw one number for each element, and not one for all, or none")
        if np.array_equal(result["bits"], result["second"]):
            raise Wrong("a second call with the same generator draws the numbers of the first: it is seeded anew")
        if not np.array_equal(result["bits"], result["again"]):
            raise Wrong("a generator of the same seed gives other numbers: draw from `random` and nothing else")
        if result["exact"].tolist() != [int(np.float32(given["x"][0]).view(np.uint32)) >> 16]:
            words = f"of {COPIES} times {given['x'][0]:g}, a bfloat16, some became another: the noise is too large"
            raise Wrong(f"{words}, it ends at 0xFFFF")
        for each, row, lower, part in zip(x, bits, below.tolist(), parts, strict=True):
            if astray := set(np.unique(row).tolist()) - {lower, lower + (part > 0)}:
                raise Wrong(f"{each:.9g} became {astray.pop():#06x}: its neighbours are {lower:#06x} and the one after")
        found, deviations = (bits != below[:, None]).mean(axis=1), (parts * (1 - parts) / DRAWS) ** 0.5
        for which in np.flatnonzero(np.abs(found - parts) > 5 * deviations):
            instead = {
                "it goes up half of the time, wherever the number lies": 0.5 * (parts > 0),
                "the chances of up and down are exchanged": 1 - parts,
            }
            says = f"{x[which]:.9g} was rounded away from zero in a part of {found[which]:.3f}"
            why = known(instead, lambda value: np.abs(found - value)[parts > 0].max() < 0.05)  # noqa: B023
            raise Wrong(f"{says}, expected {parts[which]:.3f}{why}")


def judge_scaling(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All ranks skip the same steps, and find the same scales, for one small all-reduce a step."""
    skipped = [
        not all(np.isfinite(given["gradients"][step]).all() for given in case.given)
        for step in range(len(case.given[0]["gradients"]))
    ]
    scales = scales_of(skipped)
    for rank, result in enumerate(results):
        own = [not np.isfinite(gradient).all() for gradient in case.given[rank]["gradients"]]
        infinite = [
            any(np.isinf(given["gradients"][step]).any() for given in case.given) for step in range(len(skipped))
        ]
        instead = {"a rank looks at its own gradients only": np.array(own), "only infinity counts": np.array(infinite)}
        expect_equal(rank, "whether to skip, at step", result["skipped"], np.array(skipped), instead=instead)
        instead = {
            "good steps are counted on after an overflow": lambda: np.array(scales_of(skipped, anew=False)),
            "the scale grows a step too late": lambda: np.array(scales_of(skipped, interval=INTERVAL + 1)),
            "the scale grows a step too early": lambda: np.array(scales_of(skipped, interval=INTERVAL - 1)),
            "the good steps before a growth count again": lambda: np.array(scales_of(skipped, after=False)),
            "an overflow leaves the scale as it is": lambda: np.array(scales_of(skipped, backoff=1.0)),
        }
        expect_close(rank, "the scale after step", result["scales"], np.array(scales), instead=instead)
        if (last := result["last"].tolist()) != [8.0, 2.0, 1.0, 0.0]:
            words = ", ".join("FloatingPointError" if scale == 0 else f"{scale:g}" for scale in last)
            why = "raised above 1" if last[-1] == 0 and last[-2] > 1 else "the scale stops at 1, and only there raises"
            raise Wrong(
                f"rank {rank}: overflows with backoff 0.25 gave {words}, not 8, 2, 1, FloatingPointError: {why}"
            )
    expect_small(case, notes, len(skipped), "one all-reduce a step, however many gradients there are")


def scales_of(
    skipped: Sequence[bool], interval: int = INTERVAL, backoff: float = 0.5, anew: bool = True, after: bool = True
) -> list[float]:
    """Return the scale after each step; if not `anew` or `after`, good steps count on behind overflow or growth."""
    scale, good, scales = FIRST_SCALE, 0, []
    for overflow in skipped:
        good = (0 if anew else good) if overflow else good + 1
        if overflow:
            scale *= backoff
        elif good >= interval:
            scale, good = scale * 2, 0 if after else good
        scales.append(scale)
    return scales


def expect_small(case: Case, notes: Sequence[Note], times: int, rule: str) -> None:
    """Raise `Wrong` unless what was sent is so many all-reduces of one number."""
    sent = [note for note in notes if note.kind == "send"]
    if large := next((note for note in sent if note.bytes > 8), None):
        raise Wrong(f"rank {large.rank} sent {large.bytes} bytes ({large.line}), expected one number at a time")
    if len(sent) > (most := times * 2 * case.ranks * (case.ranks - 1)):
        raise Wrong(f"{len(sent)} messages were sent, expected at most {most}: {rule}")


def descended(given: Arrays, how: str = "") -> tuple[Array, Array]:
    """Return the norms and the masters in float64; `how` is what goes wrong."""
    masters, norms, scale = given["weights"].astype(np.float64), [], float(given["scale"])
    for gradient in given["gradients"]:
        wide = gradient.astype(np.float64) / scale
        if how == "in float16":
            with np.errstate(over="ignore"):
                wide = (gradient / np.float16(scale)).astype(np.float64)
        norm = np.linalg.norm(wide)
        factor = min(1.0, 5 / norm) if norm else 1.0
        if how == "clips what is scaled":
            factor = min(1.0, 5 / np.linalg.norm(wide * scale))
        elif how == "clips each alone":
            factor = np.repeat([min(1, 5 / np.linalg.norm(part)) for part in (wide[:3], wide[3:])], (3, 4))
        elif how == "does not clip":
            factor = 1.0
        elif how == "clips each element":
            factor, wide = 1.0, np.clip(wide, -5, 5)
        step = float(given["rate"]) * wide * factor
        masters = masters - step
        if how:  # what goes wrong is told from what float32 makes of it
            masters = masters.astype(np.float16 if how == "rounds" else np.float32).astype(np.float64)
        norms.append(norm * (factor if how == "the clipped norm" else 1) * (scale if how == "the scaled norm" else 1))
    return np.array(norms), masters


def wrongly(given: Arrays, how: str, which: int) -> Array:
    """Return the norms, or what masters moved by, if something goes wrong."""
    return descended(given, how)[which] - (given["weights"] if which else 0)


def judge_descending(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Masters follow float64; weights are the masters, rounded."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        norms, masters = descended(given)
        wrongs = {
            "gradients are unscaled in float16": "in float16",
            "the norm is compared with the limit before unscaling": "clips what is scaled",
            "each gradient is clipped by its own norm": "clips each alone",
            "nothing is clipped": "does not clip",
            "each element is cut off at the limit: all are scaled by one factor": "clips each element",
            "the masters are rounded to float16 at each step": "rounds",
            "the norm is that after clipping": "the clipped norm",
            "the norm is that of the scaled gradients": "the scaled norm",
        }
        expect_close(
            rank,
            "the norm at step",
            result["norms"],
            norms,
            1e-5,
            instead={clause: partial(wrongly, given, how, 0) for clause, how in wrongs.items()},
        )
        if result["masters"].dtype != np.float32:
            raise Wrong(f"rank {rank}: the masters are {result['masters'].dtype}, expected float32")
        expect_close(
            rank,
            "what masters moved by",
            result["masters"] - given["weights"],
            masters - given["weights"],
            1e-3,
            instead={clause: partial(wrongly, given, how, 1) for clause, how in wrongs.items()},
        )
        instead = {"the model's own weights are left as they were": given["weights"]}
        expect_equal(rank, "weight", result["weights"], result["masters"].astype(np.float16), instead=instead)


def judge_quantizing(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The numbers are torch's, after saturation; the scales are the largest powers of two that fit."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        expected = in_float8(given["x"])
        for scale in (1.0, 64.0, 0.125):
            for x, found, right in zip(given["x"], result[f"by {scale:g}"], expected, strict=True):
                if found != right:
                    says = f"rank {rank}: {x / scale:.9g} by {scale:g} became {found:.9g}, expected {right:.9g}"
                    raise Wrong(says + misfit(float(x), float(found), float(right)))
        for amax, found in zip(given["amaxes"].astype(np.float64), result["scales"], strict=True):
            right = largest_scale(amax)
            if found != right:
                says = f"rank {rank}: scale_for({amax:.9g}) is {found:.9g}, expected {right:.9g}"
                raise Wrong(says + misscaled(float(amax), float(found), right))


def misscaled(amax: float, found: float, right: float) -> str:
    """Return which rule a scale breaks, in words that go behind the rejection, or nothing."""
    if np.frexp(found)[0] != 0.5:
        return ": that is not a power of two"
    if found * amax > 448:
        return f": {amax:.9g} times that is more than 448"
    return (
        ": 448 itself is a number of E4M3" if right * amax == 448 else f": {amax:.9g} times twice that is still below"
    )


def misfit(x: float, found: float, right: float) -> str:
    """Return which rule a number of float8 breaks, in words that go behind the rejection, or nothing."""
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
        instead = {clause: partial(scales_by, case.given, rank, how) for how, clause in SLIPS.items()}
        expect_equal(rank, "the scale by step and cast", result["scales"], scales, instead=instead)
        for step, cast in np.ndindex(scales.shape):
            x8 = in_float8(given["x"][step, cast] * np.float32(scales[step, cast]))
            expect_equal(rank, f"cast {cast} in step {step}", result["x8"][step, cast], x8)
        sent = [note for note in notes if note.rank == rank and note.kind in ("send", "barrier")]
        for before, after in result["marks"].reshape(-1, 2):
            if sent[before:after]:
                raise Wrong(f"rank {rank} sent a message in cast ({sent[before].line}): that is what delay is to avoid")
    expect_small(case, notes, 8, "one all-reduce in each update")


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
}


def scales_by(given: Sequence[Arrays], rank: int, how: str = "") -> Array:
    """Return a rank's scale of each cast in each step [step, cast]; `how` is one of `SLIPS`."""
    own = np.abs([each["x"] for each in given]).max(axis=-1).astype(np.float64)  # [rank, step, cast]
    counted = {"last": own[:, :, -1:], "first": own[:, :, :1]}.get(how, own).max(axis=2)
    entered = counted[rank] if how == "alone" else counted.max(axis=0)  # [step]
    history = HISTORY + {"too late": 1, "too early": -1, "never": 99}.get(how, 0)
    amaxes = np.maximum.accumulate(own[rank], axis=1) if how == "all casts" else own[rank].copy()
    for step in range(1, len(amaxes)):
        window = entered[max(0, step - history) : step]
        past = window.mean() if how == "mean" else window.max()
        amaxes[step] = {"present too": np.maximum(past, own[rank, step]), "present": own[rank, step]}.get(how, past)
    return np.vectorize(largest_scale)(amaxes)


def in_float8(x: Array) -> Array:
    """Return the nearest numbers of E4M3, as float32."""
    return torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
