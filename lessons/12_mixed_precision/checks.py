"""Lesson 12: what is checked, and for how many points.

Bits and float8 numbers are compared with torch's own, exactly; masters with float64, within
float32's rounding.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from judges import FIRST_SCALE, HISTORY, INTERVAL, judge_descending, judge_scaling
from judges_float8 import judge_delayed, judge_quantizing
from judges_rounding import CLOSE, COPIES, DRAWS, judge_nearest, judge_random

from minidist import Communicator, Trace
from minidist.course.grader import contract
from minidist.course.grader.calls import calls
from minidist.course.grader.contract import (
    BY_OPTIMIZERS,
    MEMORY,
    STRATEGIES,
    Arrays,
    Case,
    Check,
    Draw,
    Task,
)

BY_HAND = (*MEMORY, *STRATEGIES, "torch")
ROUND = Task(1, "float32 to bfloat16", BY_HAND)
SCALER = Task(2, "the loss scaler", BY_HAND)
MASTERS = Task(3, "master weights", BY_HAND, imports=BY_OPTIMIZERS)
FLOAT8 = Task(4, "float8", BY_HAND)
DELAYED = Task(5, "delayed scaling", BY_HAND)

# ---------------------------------------------------------------- cases


def each_rank(draw: Any, ranks: int, label: str, cases: int = 1) -> Draw:
    """Have `draw(rng)` return what one rank is given, for each rank of each case."""
    return lambda rng: [
        Case(
            tuple(draw(rng) for _ in range(ranks)),
            f"{label}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
        )
        for _ in range(cases)
    ]


def any_floats(rng: np.random.Generator) -> Arrays:
    """Draw floats of all sizes, half of them with few bits in the half that is cut off."""
    bits = rng.integers(1 << 32, size=300, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFF0000) | rng.choice(
        np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 150
    )
    return {"bits": bits[(bits & 0x7F800000) != 0x7F800000]}


def special_floats(rng: np.random.Generator) -> Arrays:
    """Ties of both kinds, zeros, subnormals, the largest, the infinite, and what is no number, in
    any bit.
    """
    signs = rng.integers(2, size=12, dtype=np.uint32) << 31
    ties = [
        0x3F808000,
        0x3F818000,
        0x3F807FFF,
        0x3F808001,
        0x00000001,
        0x00018000,
        0x7F7F7FFF,
        0x7F7FFFFF,
    ]
    return {"bits": np.array([*ties, 0, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32) | signs}


def few_floats(rng: np.random.Generator) -> Arrays:
    """Some numbers to be rounded at random, of which the first is a bfloat16."""
    x = (rng.choice([-1, 1], 6) * np.exp2(rng.uniform(-20, 20, 6))).astype(np.float32)
    return {"x": np.concatenate([[np.float32(1.5)], x]), "seed": rng.integers(1 << 30)}


# step, element
OVERFLOWS = ((1, 1, np.inf), (2, 4, np.nan), (7, 6, -np.inf), (14, 7, np.nan), (15, 3, np.inf))


def overflows(ranks: int, steps: int) -> Draw:
    """Draw float16 gradients for each step, of which one rank's are not finite in some."""

    def draw(rng: np.random.Generator) -> list[Case]:
        given = [rng.normal(size=(steps, 8)).astype(np.float16) for _ in range(ranks)]
        for step, at, value in OVERFLOWS:
            given[rng.integers(ranks)][step, at] = value
        given[0][4, 0] = 65504  # the largest is no overflow, though its square is one
        return [Case(tuple({"gradients": each} for each in given), f"{ranks} ranks, {steps} steps")]

    return draw


def small_updates(rng: np.random.Generator) -> Arrays:
    """Weights near 1, and ten steps of scaled gradients, some of which are to be clipped."""
    sizes = np.array([0.2, 1, 3, 0.5, 6, 1, 0.1, 2, 1, 4])[:, None]
    gradients = rng.normal(size=(10, 7)) * sizes * 256
    how = {"scale": np.array(256.0), "rate": np.array(2.0**-12)}
    return {
        "weights": (1 + rng.random(7)).astype(np.float16),
        "gradients": gradients.astype(np.float16),
        **how,
    }


def small_gradients(rng: np.random.Generator) -> Arrays:
    """Draw the same with gradients that float16 does not have, but for their scale."""
    given, how = small_updates(rng), {"scale": np.array(2.0**15), "rate": np.array(2.0**9)}
    return {
        **given,
        "gradients": (given["gradients"] * np.float16(2.0**-14)).astype(np.float16),
        **how,
    }


def magnitudes(rng: np.random.Generator) -> Arrays:
    """Numbers of all sizes that E4M3 has, its ties, and beyond; and some magnitudes to find a scale
    for.
    """
    sizes = np.exp2(rng.uniform(-13, 10, 200)) * rng.choice([-1, 1], 200)
    ties = [
        2.0**-10,
        3 * 2.0**-10,
        2.0**-11,
        1.0625,
        1.1875,
        448.0,
        464.0,
        465.0,
        1e6,
        0.0,
        0.0146484375,
    ]
    amaxes = [
        448.0,
        448.5,
        447.5,
        1.0,
        1.75,
        1.7500001,
        2.0**-20,
        *np.exp2(rng.uniform(-20, 20, 20)),
    ]
    return {"x": np.array([*sizes, *ties], np.float32), "amaxes": np.array(amaxes, np.float32)}


def growing(rng: np.random.Generator) -> Arrays:
    """A tensor of two parts over eight steps, with an outlier, that grows and shrinks; at first one
    part is small.
    """
    sizes = np.array([1, 2, 50, 3, 0.1, 0.1, 0.2, 9])[:, None, None] * np.ones((1, 2, 1))
    sizes[0, 1] /= 64
    return {"x": (rng.normal(size=(8, 2, 5)) * sizes * rng.uniform(0.5, 4)).astype(np.float32)}


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def nearest(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, to the nearest."""
    x = given["bits"].view(np.float32).copy()
    with contract.untouched(x=x):
        return {"bits": exercise.to_bfloat16(x)}


def at_random(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1, at random, on many copies of each number."""
    x, seed = np.repeat(given["x"].astype(np.float32), DRAWS), int(given["seed"])
    random = np.random.default_rng(seed)
    with contract.untouched(x=x):
        first, second = (exercise.round_at_random(x, random) for _ in range(2))
    exact = given["x"][:1].astype(np.float32)
    close = (exact.view(np.uint32) + CLOSE).view(np.float32)
    exact, close = (
        exercise.round_at_random(np.repeat(one, COPIES), random) for one in (exact, close)
    )
    again = exercise.round_at_random(x, np.random.default_rng(seed))
    few = {"exact": np.unique(exact), "close": [len(np.unique(close)), np.sum(close != exact)]}
    return {"bits": first, "second": second, "again": again, **few}


def scaling(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 over all steps; then overflow until it complains."""
    comm.trace = trace = Trace()
    scaler = exercise.LossScaler(comm, scale=FIRST_SCALE, interval=INTERVAL)
    skipped, scales = [], []
    for gradient in given["gradients"]:
        several = [
            gradient[:3].copy(),
            gradient[3:5].reshape(2, 1).copy(),
            *(gradient[i : i + 1].copy() for i in (5, 6, 7)),
        ]
        with contract.untouched(**{f"gradients[{i}]": each for i, each in enumerate(several)}):
            skipped.append(bool(scaler.overflowed(several)))
        try:
            scaler.update(skipped[-1])
            scales.append(scaler.scale)
        except FloatingPointError:
            scales.append(-1.0)
    scaler, last = exercise.LossScaler(comm, scale=8.0, backoff=0.25), [8.0]
    try:
        for _ in range(9):  # 8, 2, 1, and then it is not the scale's fault
            scaler.update(True)
            last.append(scaler.scale)
    except FloatingPointError:
        last.append(0.0)
    except (ArithmeticError, ValueError, RuntimeError):
        last.append(-1.0)
    return {"skipped": skipped, "scales": scales, "last": last, "calls": len(calls(trace))}


def descending(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 on two weights for ten steps."""
    weights = [given["weights"][:3].copy(), given["weights"][3:].reshape(2, 2).copy()]
    optimizer, norms, changed = exercise.MasterWeights(weights, rate=float(given["rate"])), [], -1
    for number, gradient in enumerate(given["gradients"]):
        several = [gradient[:3].copy(), gradient[3:].reshape(2, 2).copy()]
        norms.append(float(optimizer.step(several, float(given["scale"]), 5.0)))
        if changed < 0 and not np.array_equal(
            np.concatenate([each.ravel() for each in several]), gradient
        ):
            changed = number
    masters = np.concatenate([master.ravel() for master in optimizer.masters])
    found = {"norms": norms, "masters": masters, "changed": changed}
    return found | {"weights": np.concatenate([weight.ravel() for weight in weights])}


def quantizing(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    found = {}
    for scale in (1.0, 64.0, 0.125):
        x = given["x"] / np.float32(scale)
        with contract.untouched(x=x):
            found[f"by {scale:g}"] = exercise.quantize(x, scale)
    return found | {"scales": [float(exercise.scale_for(float(amax))) for amax in given["amaxes"]]}


def delayed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5: two casts in each step, then an update."""
    comm.trace = trace = Trace()
    scale, found, marks = exercise.DelayedScale(comm, HISTORY), [], []
    for parts in given["x"]:
        marks.append(comm.traffic.messages)
        parts = parts.copy()
        with contract.untouched(x=parts):
            found.append([(x8, float(by)) for x8, by in map(scale.cast, parts)])
        marks.append(comm.traffic.messages)
        scale.update()
    x8 = [[x8 for x8, _ in step] for step in found]
    return {
        "x8": np.array(x8),
        "scales": [[by for _, by in step] for step in found],
        "marks": marks,
        "calls": len(calls(trace)),
    }


CHECKS = [
    Check(
        ROUND,
        "to the nearest",
        6,
        each_rank(any_floats, 1, "floats of all sizes"),
        nearest,
        judge_nearest,
    ),
    Check(
        ROUND,
        "ties, infinities, no numbers",
        6,
        each_rank(special_floats, 1, "specials"),
        nearest,
        judge_nearest,
    ),
    Check(
        ROUND, "at random", 5, each_rank(few_floats, 1, "seven numbers"), at_random, judge_random
    ),
    Check(
        ROUND,
        "under mpirun",
        2,
        each_rank(any_floats, 2, "all sizes"),
        nearest,
        judge_nearest,
        wire="mpi",
    ),
    Check(SCALER, "skips together", 10, overflows(3, 17), scaling, judge_scaling),
    Check(SCALER, "one rank", 3, overflows(1, 17), scaling, judge_scaling),
    Check(SCALER, "under mpirun", 2, overflows(2, 17), scaling, judge_scaling, wire="mpi"),
    Check(
        MASTERS,
        "remembers small updates",
        8,
        each_rank(small_updates, 2, "ten steps"),
        descending,
        judge_descending,
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
        MASTERS,
        "under mpirun",
        2,
        each_rank(small_updates, 2, "ten steps"),
        descending,
        judge_descending,
        wire="mpi",
    ),
    Check(
        FLOAT8, "quantises", 12, each_rank(magnitudes, 1, "all sizes"), quantizing, judge_quantizing
    ),
    Check(
        FLOAT8,
        "under mpirun",
        2,
        each_rank(magnitudes, 2, "all sizes"),
        quantizing,
        judge_quantizing,
        wire="mpi",
    ),
    Check(
        DELAYED,
        "goes by the past of all ranks",
        12,
        each_rank(growing, 3, "eight steps"),
        delayed,
        judge_delayed,
    ),
    Check(
        DELAYED,
        "under mpirun",
        2,
        each_rank(growing, 2, "eight steps"),
        delayed,
        judge_delayed,
        wire="mpi",
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        ROUND,
        "others",
        2,
        each_rank(any_floats, 1, "all sizes"),
        nearest,
        judge_nearest,
        hidden=True,
    ),
    Check(
        ROUND,
        "others at random",
        3,
        each_rank(few_floats, 1, "seven"),
        at_random,
        judge_random,
        hidden=True,
    ),
    Check(SCALER, "others", 5, overflows(4, 20), scaling, judge_scaling, hidden=True),
    Check(
        MASTERS,
        "others",
        5,
        each_rank(small_updates, 1, "ten"),
        descending,
        judge_descending,
        hidden=True,
    ),
    Check(
        FLOAT8,
        "others",
        4,
        each_rank(magnitudes, 1, "all sizes"),
        quantizing,
        judge_quantizing,
        hidden=True,
    ),
    Check(
        DELAYED,
        "others",
        5,
        each_rank(growing, 4, "eight steps"),
        delayed,
        judge_delayed,
        hidden=True,
    ),
]
