"""Lesson 12: what is checked, and for how many points.

Bits and float8 numbers are compared with torch's own, exactly; masters with float64, within float32's rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Check,
    Draw,
    Note,
    Task,
    Wrong,
    expect_close,
    expect_equal,
)

BY_HAND = ("minidist.memory", "minidist.parallel", "torch")
ROUND = Task(1, "float32 to bfloat16", BY_HAND)
SCALER = Task(2, "the loss scaler", BY_HAND)
MASTERS = Task(3, "master weights", BY_HAND, imports=contract.BY_OPTIMIZERS)
FLOAT8 = Task(4, "float8", BY_HAND)
DELAYED = Task(5, "delayed scaling", BY_HAND)
DRAWS = 4000  # roundings of each number at random
COPIES = 1_000_000  # of a number that is a bfloat16 already, and is not to be moved once in 65,536 times
INTERVAL, FIRST_SCALE, HISTORY = 3, 8.0, 3

# ---------------------------------------------------------------- cases


def each_rank(draw: Any, ranks: int, label: str, cases: int = 1) -> Draw:
    """Have `draw(rng)` return what one rank is given, for each rank of each case."""
    return lambda rng: [
        Case(tuple(draw(rng) for _ in range(ranks)), f"{label}, {ranks} {'rank' if ranks == 1 else 'ranks'}")
        for _ in range(cases)
    ]


def any_floats(rng: np.random.Generator) -> Arrays:
    """Draw floats of all sizes, half of them with few bits in the half that is cut off."""
    bits = rng.integers(1 << 32, size=300, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFF0000) | rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 150)
    return {"bits": bits[(bits & 0x7F800000) != 0x7F800000]}


def special_floats(rng: np.random.Generator) -> Arrays:
    """Ties of both kinds, zeros, subnormals, the largest, the infinite, and what is no number, in any bit."""
    signs = rng.integers(2, size=12, dtype=np.uint32) << 31
    ties = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x00018000, 0x7F7F7FFF, 0x7F7FFFFF]
    return {"bits": np.array([*ties, 0, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32) | signs}


def few_floats(rng: np.random.Generator) -> Arrays:
    """Some numbers to be rounded at random, of which the first is a bfloat16."""
    x = (rng.choice([-1, 1], 6) * np.exp2(rng.uniform(-20, 20, 6))).astype(np.float32)
    return {"x": np.concatenate([[np.float32(1.5)], x]), "seed": rng.integers(1 << 30)}


def overflows(ranks: int, steps: int) -> Draw:
    """Draw float16 gradients for each step, of which one rank's are not finite in some."""

    def draw(rng: np.random.Generator) -> list[Case]:
        given = [rng.normal(size=(steps, 8)).astype(np.float16) for _ in range(ranks)]
        for step in (1, 2, 7):
            given[rng.integers(ranks)][step, rng.integers(8)] = rng.choice([np.inf, -np.inf, np.nan])
        given[0][4, 0] = 65504  # the largest is no overflow, though its square is one
        return [Case(tuple({"gradients": each} for each in given), f"{ranks} ranks, {steps} steps")]

    return draw


def small_updates(rng: np.random.Generator) -> Arrays:
    """Weights near 1, and ten steps of scaled gradients, some of which are to be clipped."""
    sizes = np.array([0.2, 1, 3, 0.5, 6, 1, 0.1, 2, 1, 4])[:, None]
    gradients = rng.normal(size=(10, 7)) * sizes * 256
    how = {"scale": np.array(256.0), "rate": np.array(2.0**-12)}
    return {"weights": (1 + rng.random(7)).astype(np.float16), "gradients": gradients.astype(np.float16), **how}


def small_gradients(rng: np.random.Generator) -> Arrays:
    """Draw the same with gradients that float16 does not have, but for their scale."""
    given, how = small_updates(rng), {"scale": np.array(2.0**15), "rate": np.array(2.0**9)}
    return {**given, "gradients": (given["gradients"] * np.float16(2.0**-14)).astype(np.float16), **how}


def magnitudes(rng: np.random.Generator) -> Arrays:
    """Numbers of all sizes that E4M3 has, its ties, and beyond; and some magnitudes to find a scale for."""
    sizes = np.exp2(rng.uniform(-13, 10, 200)) * rng.choice([-1, 1], 200)
    ties = [2.0**-10, 3 * 2.0**-10, 2.0**-11, 1.0625, 1.1875, 448.0, 464.0, 465.0, 1e6, 0.0, 0.0146484375]
    amaxes = [448.0, 448.5, 447.5, 1.0, 1.75, 1.7500001, 2.0**-20, *np.exp2(rng.uniform(-20, 20, 20))]
    return {"x": np.array([*sizes, *ties], np.float32), "amaxes": np.array(amaxes, np.float32)}


def growing(rng: np.random.Generator) -> Arrays:
    """A tensor of two parts over eight steps, with an outlier, that grows and shrinks."""
    sizes = np.array([1, 2, 50, 3, 0.1, 0.1, 0.2, 9])[:, None, None]
    return {"x": (rng.normal(size=(8, 2, 5)) * sizes * rng.uniform(0.5, 4)).astype(np.float32)}


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def nearest(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, to the nearest."""
    return {"bits": exercise.to_bfloat16(given["bits"].view(np.float32).copy())}


def at_random(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, at random, on many copies of each number."""
    x, seed = np.repeat(given["x"].astype(np.float32), DRAWS), int(given["seed"])
    random = np.random.default_rng(seed)
    first, second = (exercise.round_at_random(x, random) for _ in range(2))
    exact = exercise.round_at_random(np.repeat(given["x"][:1].astype(np.float32), COPIES), random)
    again = exercise.round_at_random(x, np.random.default_rng(seed))
    return {"bits": first, "second": second, "again": again, "exact": np.unique(exact)}


def scaling(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 over all steps; then overflow until it complains."""
    scaler = exercise.LossScaler(comm, scale=FIRST_SCALE, interval=INTERVAL)
    skipped, scales = [], []
    for gradient in given["gradients"]:
        several = [
            gradient[:3].copy(),
            gradient[3:5].reshape(2, 1).copy(),
            *(gradient[i : i + 1].copy() for i in (5, 6, 7)),
        ]
        skipped.append(bool(scaler.overflowed(several)))
        scaler.update(skipped[-1])
        scales.append(scaler.scale)
    scaler, last = exercise.LossScaler(comm, scale=8.0, backoff=0.25), [8.0]
    try:
        for _ in range(9):  # 8, 2, 1, and then it is not the scale's fault
            scaler.update(True)
            last.append(scaler.scale)
    except FloatingPointError:
        last.append(0.0)
    return {"skipped": skipped, "scales": scales, "last": last}


def descending(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 on two weights for ten steps."""
    weights = [given["weights"][:3].copy(), given["weights"][3:].reshape(2, 2).copy()]
    optimizer, norms = exercise.MasterWeights(weights, rate=float(given["rate"])), []
    for gradient in given["gradients"]:
        several = [gradient[:3].copy(), gradient[3:].reshape(2, 2).copy()]
        norms.append(float(optimizer.step(several, float(given["scale"]), 5.0)))
    masters = np.concatenate([master.ravel() for master in optimizer.masters])
    return {"norms": norms, "masters": masters, "weights": np.concatenate([weight.ravel() for weight in weights])}


def quantizing(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    found = {f"by {scale:g}": exercise.quantize(given["x"] / np.float32(scale), scale) for scale in (1.0, 64.0, 0.125)}
    return found | {"scales": [float(exercise.scale_for(float(amax))) for amax in given["amaxes"]]}


def delayed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5: two casts in each step, then an update."""
    scale, found, marks = exercise.DelayedScale(comm, HISTORY), [], []
    for parts in given["x"]:
        marks.append(comm.traffic.messages_sent)
        found.append([(x8, float(by)) for x8, by in (scale.cast(part.copy()) for part in parts)])
        marks.append(comm.traffic.messages_sent)
        scale.update()
    x8 = [[x8 for x8, _ in step] for step in found]
    return {"x8": np.array(x8), "scales": [[by for _, by in step] for step in found], "marks": marks}


# ---------------------------------------------------------------- judges: in the grader's process


def judge_nearest(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The bits are torch's; of what is no number any will do."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        x = torch.tensor(given["bits"].view(np.float32))
        expected, found = x.bfloat16().view(torch.int16).numpy().view(np.uint16), result["bits"]
        if found.dtype != np.uint16 or found.shape != expected.shape:
            raise Wrong(f"rank {rank}: bits of {found.dtype} {found.shape}, expected uint16 {expected.shape}")
        nan = x.isnan().numpy()
        for at in np.flatnonzero(np.where(nan, (found & 0x7FFF) <= 0x7F80, found != expected)):
            name = "one that is not a number" if nan[at] else f"{expected[at]:#06x}"
            raise Wrong(f"float32 {given['bits'][at]:#010x} ({x[at]:.9g}) became {found[at]:#06x}, expected {name}")


def judge_random(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each result is a neighbour, and as many are the upper one as there should be, within five deviations."""
    for given, result in zip(case.given, results, strict=True):
        bits = result["bits"].astype(np.uint32).reshape(len(given["x"]), DRAWS)
        if np.array_equal(result["bits"], result["second"]):
            raise Wrong("a second call with the same generator draws the numbers of the first: it is seeded anew")
        if not np.array_equal(result["bits"], result["again"]):
            raise Wrong("a generator of the same seed gives other numbers: draw from `random` and nothing else")
        if result["exact"].tolist() != [int(np.float32(given["x"][0]).view(np.uint32)) >> 16]:
            words = f"of {COPIES} times {given['x'][0]:g}, a bfloat16, some became another: the noise is too large"
            raise Wrong(f"{words}, it ends at 0xFFFF")
        for x, row in zip(given["x"].astype(np.float32), bits, strict=True):
            below = int(x.view(np.uint32)) >> 16  # towards zero
            part = (int(x.view(np.uint32)) & 0xFFFF) / 65536
            if astray := set(np.unique(row).tolist()) - {below, below + (part > 0)}:
                raise Wrong(f"{x:.9g} became {astray.pop():#06x}: its neighbours are {below:#06x} and the one after")
            found, deviation = float(np.mean(row != below)), (part * (1 - part) / DRAWS) ** 0.5
            if abs(found - part) > 5 * deviation:
                raise Wrong(f"{x:.9g} was rounded away from zero in a part of {found:.3f}, expected {part:.3f}")


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
    expect_small(case, notes, len(skipped))


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


def expect_small(case: Case, notes: Sequence[Note], times: int) -> None:
    """Raise `Wrong` unless what was sent is so many all-reduces of one number."""
    sent = [note for note in notes if note.kind == "send"]
    if large := next((note for note in sent if note.bytes > 8), None):
        raise Wrong(f"rank {large.rank} sent {large.bytes} bytes ({large.line}), expected one number at a time")
    if len(sent) > (most := times * 2 * case.ranks * (case.ranks - 1)):
        raise Wrong(f"{len(sent)} messages were sent, expected at most {most}: one all-reduce a step")


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
        step = float(given["rate"]) * wide * factor
        masters = (masters - step).astype(np.float16).astype(np.float64) if how == "rounds" else masters - step
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
                    raise Wrong(f"rank {rank}: {x / scale:.9g} by {scale:g} became {found:.9g}, expected {right:.9g}")
        for amax, found in zip(given["amaxes"], result["scales"], strict=True):
            right = float(np.exp2(np.floor(np.log2(448 / np.float64(amax)))))
            if found != right:
                raise Wrong(f"rank {rank}: scale_for({amax:.9g}) is {found:.9g}, expected {right:.9g}")


def judge_delayed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Every scale goes by the past of all ranks, and only updates send."""
    amaxes = [max(float(np.abs(given["x"][step]).max()) for given in case.given) for step in range(8)]
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        for step, parts in enumerate(given["x"]):
            for cast, part in enumerate(parts):
                amax = max(amaxes[max(0, step - HISTORY) : step]) if step else float(np.abs(part).max())
                right = float(np.exp2(np.floor(np.log2(448 / amax))))
                if (found := float(result["scales"][step, cast])) != right:
                    raise Wrong(
                        f"rank {rank}: the scale of cast {cast} in step {step} is {found:g}, expected {right:g}"
                    )
                name = f"cast {cast} in step {step}"
                expect_equal(rank, name, result["x8"][step, cast], in_float8(part * np.float32(right)))
        sent = [note for note in notes if note.rank == rank and note.kind in ("send", "barrier")]
        for before, after in result["marks"].reshape(-1, 2):
            if sent[before:after]:
                raise Wrong(f"rank {rank} sent a message in cast ({sent[before].line}): that is what delay is to avoid")
    expect_small(case, notes, 8)


def in_float8(x: Array) -> Array:
    """Return the nearest numbers of E4M3, as float32."""
    return torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()


CHECKS = [
    Check(ROUND, "to the nearest", 6, each_rank(any_floats, 1, "floats of all sizes"), nearest, judge_nearest),
    Check(ROUND, "ties, infinities, no numbers", 6, each_rank(special_floats, 1, "specials"), nearest, judge_nearest),
    Check(ROUND, "at random", 5, each_rank(few_floats, 1, "seven numbers"), at_random, judge_random),
    Check(ROUND, "under mpirun", 2, each_rank(any_floats, 2, "all sizes"), nearest, judge_nearest, wire="mpi"),
    Check(SCALER, "skips together", 10, overflows(3, 14), scaling, judge_scaling),
    Check(SCALER, "one rank", 3, overflows(1, 14), scaling, judge_scaling),
    Check(SCALER, "under mpirun", 2, overflows(2, 14), scaling, judge_scaling, wire="mpi"),
    Check(
        MASTERS, "remembers small updates", 8, each_rank(small_updates, 2, "ten steps"), descending, judge_descending
    ),
    Check(
        MASTERS,
        "small gradients, a large scale",
        4,
        each_rank(small_gradients, 1, "ten steps, scale 2^15"),
        descending,
        judge_descending,
    ),
    Check(
        MASTERS, "under mpirun", 2, each_rank(small_updates, 2, "ten steps"), descending, judge_descending, wire="mpi"
    ),
    Check(FLOAT8, "quantises", 12, each_rank(magnitudes, 1, "all sizes"), quantizing, judge_quantizing),
    Check(FLOAT8, "under mpirun", 2, each_rank(magnitudes, 2, "all sizes"), quantizing, judge_quantizing, wire="mpi"),
    Check(DELAYED, "goes by the past of all ranks", 12, each_rank(growing, 3, "eight steps"), delayed, judge_delayed),
    Check(DELAYED, "under mpirun", 2, each_rank(growing, 2, "eight steps"), delayed, judge_delayed, wire="mpi"),
]

# ---- hidden: the handout ends here ----

CHECKS += [
    Check(ROUND, "others", 2, each_rank(any_floats, 1, "all sizes"), nearest, judge_nearest, hidden=True),
    Check(ROUND, "others at random", 3, each_rank(few_floats, 1, "seven"), at_random, judge_random, hidden=True),
    Check(SCALER, "others", 5, overflows(4, 20), scaling, judge_scaling, hidden=True),
    Check(MASTERS, "others", 5, each_rank(small_updates, 1, "ten"), descending, judge_descending, hidden=True),
    Check(FLOAT8, "others", 4, each_rank(magnitudes, 1, "all sizes"), quantizing, judge_quantizing, hidden=True),
    Check(DELAYED, "others", 5, each_rank(growing, 4, "eight steps"), delayed, judge_delayed, hidden=True),
]
