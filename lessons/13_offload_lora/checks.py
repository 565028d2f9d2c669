"""Lesson 13: what is checked, and for how many points.

Numbers are float64, but for NF4, whose scales are float32 by definition: there every rounding that lies within its
rule is taken for right.
"""

from __future__ import annotations

import numpy as np
from judges import STEPS, judge_lora, judge_nf4, judge_offload, judge_reduce, run_lora, run_nf4, run_offload, run_reduce

from minidist.course.grader.contract import BY_OPTIMIZERS, Case, Check, Draw, Task

BY_HAND = ("minidist.memory", "minidist.parallel")
LORA = Task(1, "an adapter", BY_HAND)
REDUCE = Task(2, "only adapters are reduced", BY_HAND)
NF4 = Task(3, "weights in four bits", BY_HAND)
OFFLOAD = Task(4, "an optimizer with its state elsewhere", BY_HAND, imports=BY_OPTIMIZERS)


# ---------------------------------------------------------------- cases


def layers(*sizes: tuple[int, int, int, int]) -> Draw:
    """Draw (ranks, outputs, inputs, rank of the adapter): one layer for all, a batch for each rank."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for ranks, outputs, inputs, low in sizes:
            common = {"weight": rng.normal(size=(outputs, inputs)), "bias": rng.normal(size=outputs)}
            common |= {"A": rng.normal(size=(low, inputs)), "B": rng.normal(size=(outputs, low))}
            common |= {"alpha": rng.integers(2, 9) / 2, "seed": rng.integers(1 << 30)}
            given = tuple({**common, "x": rng.normal(size=(3, inputs))} for _ in range(ranks))
            label = f"{outputs} x {inputs}, adapter of rank {low}, on {ranks} rank{'s' * (ranks > 1)}"
            cases.append(Case(tuple({name: np.asarray(value) for name, value in one.items()} for one in given), label))
        return cases

    return draw


def weights(*shapes: tuple[int, ...], size: float = 1.0) -> Draw:
    """Draw weights to be packed, of blocks with scales far apart, times `size`, and packed ones to be read."""

    def draw(rng: np.random.Generator) -> list[Case]:
        cases = []
        for shape in shapes:
            count = int(np.prod(shape))
            blocks, groups = -(-count // 64), -(-count // 64 // 256)
            flat = rng.normal(size=count) * np.repeat(rng.uniform(0.01, 0.05, blocks), 64)[:count]
            flat *= size
            flat[count // 2 : count // 2 + 3] = 0
            codes = rng.integers(0, 256, -(-count // 2)).astype("uint8")
            codes[-1] &= 0xF0 if count % 2 else 0xFF
            steps, scales = rng.uniform(1e-4, 2e-4, groups).astype("float32"), rng.integers(-127, 128, blocks)
            packed = {"codes": codes, "scales": scales.astype("int8"), "steps": steps, "mean": np.float32([0.04])}
            given = {"weights": flat.reshape(shape).astype("float32"), **packed}
            cases.append(Case((given,), f"weights of shape {shape}"))
        return cases

    return draw


def optimized(*sizes: tuple[int, int]) -> Draw:
    """Draw (ranks, parameters) and their gradients in each step, flat; those of every third are frozen."""

    def draw(rng: np.random.Generator) -> list[Case]:
        return [
            Case(
                tuple(
                    {"start": rng.normal(size=(count, 5)), "gradients": rng.normal(size=(STEPS, count, 5))}
                    for _ in range(ranks)
                ),
                f"{count} parameters on {ranks} rank{'s' * (ranks > 1)}, {STEPS} steps",
            )
            for ranks, count in sizes
        ]

    return draw


# ---------------------------------------------------------------- the checks


CHECKS = [
    Check(LORA, "forward, backward and merged", 14, layers((1, 6, 5, 2), (2, 16, 32, 4)), run_lora, judge_lora),
    Check(LORA, "the same under mpirun", 3, layers((2, 8, 20, 3)), run_lora, judge_lora, wire="mpi"),
    Check(REDUCE, "one ring", 14, layers((2, 6, 8, 2), (3, 10, 12, 3)), run_reduce, judge_reduce),
    Check(REDUCE, "the same under mpirun", 3, layers((2, 9, 7, 2)), run_reduce, judge_reduce, wire="mpi"),
    Check(NF4, "a few blocks", 12, weights((4, 64), (10, 32)), run_nf4, judge_nf4),
    Check(NF4, "a last block, and a last byte, that are not full", 6, weights((7, 23)), run_nf4, judge_nf4),
    Check(NF4, "all are zero", 2, weights((3, 43), size=0.0), run_nf4, judge_nf4),
    Check(NF4, "more than one group", 4, weights((130, 257)), run_nf4, judge_nf4),
    Check(OFFLOAD, "three steps", 14, optimized((1, 3), (1, 7)), run_offload, judge_offload),
    Check(OFFLOAD, "the same under mpirun", 3, optimized((2, 4)), run_offload, judge_offload, wire="mpi"),
]

# ---- hidden: the handout ends here ----


CHECKS += [
    Check(LORA, "other sizes", 7, layers((2, 17, 35, 3)), run_lora, judge_lora, hidden=True),
    Check(REDUCE, "other sizes", 6, layers((5, 3, 8, 1), (4, 8, 5, 2)), run_reduce, judge_reduce, hidden=True),
    Check(NF4, "other shapes", 6, weights((5, 211), (1, 40)), run_nf4, judge_nf4, hidden=True),
    Check(OFFLOAD, "other sizes", 6, optimized((3, 10), (1, 4)), run_offload, judge_offload, hidden=True),
]
