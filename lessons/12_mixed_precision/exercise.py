"""Lesson 12: mixed precision. Compute in 16 or 8 bits, remember in 32, and know what every bit is for.

                sign  exponent  mantissa     largest    next above 1
    float32        1         8        23      3.4e38    1 + 2^-23
    bfloat16       1         8         7      3.4e38    1 + 2^-7
    float16        1         5        10       65504    1 + 2^-10
    float8 E4M3    1         4         3         448    1 + 2^-3

Fill in the functions and classes; their docstrings are the contract. You need numpy alone, and one collective:

    all_reduce(array, comm, op="max")      replaces every rank's array by the largest of all ranks', element by element;
                                           the array has at least one dimension

numpy has float16; it has neither bfloat16 nor float8, whose numbers you make from float32 yourself. `minidist.memory`
and torch's conversions are what you are building: calling anything of `minidist.memory` or of torch scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 12             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import minidist
from minidist import Communicator
from minidist.collectives import all_reduce  # noqa: F401

Array = np.ndarray[Any, Any]


def to_bfloat16(x: Array) -> Array:
    """Task 1: return the bits of the bfloat16 that is nearest to each float32 of `x`, as uint16.

    bfloat16 is the upper half of a float32 (`x.view(np.uint32) >> 16`); rounding is what happens to the lower half.

    - Of two that are equally near, take the one whose last bit is 0.
    - Beyond the largest, nearest means infinite; infinite stays infinite; -0 stays -0.
    - What is not a number stays so, even if only its lower bits say that it is none. Any such pattern will do.
    """
    raise NotImplementedError("task 1 is not started")


def round_at_random(x: Array, random: np.random.Generator) -> Array:
    """Task 1, too: return the bits of one of the two bfloat16 around each float32 of `x`, as uint16.

    The upper or the lower one is taken at random, so that the expected value of the result is `x` itself: a number a
    quarter of the way up is rounded up one time in four. Numbers that are bfloat16 already stay as they are.

    Parameters
    ----------
    x : float32 array
        Finite, and smaller than 1e38 in magnitude.
    random
        What to draw from, as in `random.integers(...)`: an independent number for each element. Seed nothing: the next
        call goes on drawing where this one ended.
    """
    raise NotImplementedError("task 1 is not started")


class LossScaler:
    """Task 2: finds the largest loss scale that float16 gradients bear.

    Parameters
    ----------
    comm : Communicator
        All ranks that train together.
    scale, growth, backoff, interval
        `scale`, at least 1, is the first one. After `interval` good steps in a row since it last changed it is
        multiplied by `growth`; after an overflow, by `backoff`.

    Attributes
    ----------
    scale : float
        What the next loss is to be multiplied by.
    """

    scale: float

    def __init__(
        self,
        comm: Communicator,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        raise NotImplementedError("task 2 is not started")

    def overflowed(self, gradients: Sequence[Array]) -> bool:
        """Tell whether on any rank any element of any of its `gradients` (float16) is infinite or not a number.

        The same answer on every rank, for one all-reduce of one number, however many gradients there are.
        """
        raise NotImplementedError("task 2 is not started")

    def update(self, overflow: bool) -> None:
        """Choose the scale of the next step. What would become smaller than 1 becomes 1.

        Raises
        ------
        FloatingPointError
            If there is an overflow although the scale is 1 already: then it is not the scale's fault.
        """
        raise NotImplementedError("task 2 is not started")


class MasterWeights:
    """Task 3: plain gradient descent on float32 copies of float16 weights.

    Parameters
    ----------
    weights : sequence of float16 arrays
        What the model computes with. They stay the same objects, and are changed in place.
    rate : float
        The learning rate.

    Attributes
    ----------
    masters : list of float32 arrays
        At first the weights. After each step the weights are the masters, rounded to the nearest (`astype`).
    """

    masters: list[Array]

    def __init__(self, weights: Sequence[Array], rate: float) -> None:
        raise NotImplementedError("task 3 is not started")

    def step(self, gradients: Sequence[Array], scale: float, limit: float) -> float:
        """Update masters and weights; return the norm of the gradients, unscaled, before they were clipped.

        Parameters
        ----------
        gradients : sequence of float16 arrays
            Of the loss times `scale`, one for each weight; all finite. They must stay as they are. Unscale in float32:
            what is small once it is unscaled, float16 does not have.
        limit : float
            If the joint norm of all unscaled gradients is larger, all are multiplied by limit / norm. Compute in
            float32: a square of a float16 is easily more than 65504.
        """
        raise NotImplementedError("task 3 is not started")


def scale_for(amax: float) -> float:
    """Task 4: return the largest power of two that, times `amax` > 0, is at most 448.

    A power of two, since multiplying by it and dividing again rounds nothing.
    """
    raise NotImplementedError("task 4 is not started")


def quantize(x: Array, scale: float) -> Array:
    """Task 4, too: return the number of float8 E4M3 that is nearest to each element of `x * scale`, as float32.

    E4M3 has the numbers (1 + m/8) 2^e with m = 0 to 7 and e = -6 to 8, up to 448 = (1 + 6/8) 2^8; below 2^-6 it has
    the multiples of 2^-9; and the negative of all these. There is no infinity.

    - Of two that are equally near, take the one with the even m (or the even multiple).
    - Beyond 448, take 448.

    Parameters
    ----------
    x : float32 array
        Finite, as its products with `scale` are.
    """
    raise NotImplementedError("task 4 is not started")


class DelayedScale:
    """Task 5: the scale of one tensor, by the largest magnitudes (amax) that it had in the last steps.

    Parameters
    ----------
    comm : Communicator
        All ranks that hold parts of the tensor, or see their own rows of it.
    history : int
        How many steps the scale goes by.
    """

    def __init__(self, comm: Communicator, history: int) -> None:
        raise NotImplementedError("task 5 is not started")

    def cast(self, x: Array) -> tuple[Array, float]:
        """Return `quantize(x, scale)` and the scale. No messages.

        The scale is `scale_for` the largest amax of the last `history` steps, over all ranks. The present `x` has no
        part in it, except before the first `update`, when there is no past: then it is this rank's own amax of this
        `x`. No amax is 0.
        The magnitudes of `x` are remembered for `update`; `cast` may be called several times in a step.
        """
        raise NotImplementedError("task 5 is not started")

    def update(self) -> None:
        """End a step: its amax, the largest of all ranks and all casts, enters the history, and the oldest leaves.

        One all-reduce of one number.
        """
        raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        x = np.array([1.0, 1.00390625, 1.01171875, 3.14159], np.float32)
        bits = to_bfloat16(x), round_at_random(x, np.random.default_rng(0))
        nearest, random = ((each.astype(np.uint32) << 16).view(np.float32) for each in bits)
        return f"{x} to the nearest {nearest}, at random {random}"

    def task_2() -> str:
        scaler, scales = LossScaler(comm, interval=2), []
        for step in range(4):
            fine = step != 1 or comm.rank != comm.size - 1
            scaler.update(scaler.overflowed([np.array([1.0 if fine else np.inf], np.float16)]))
            scales.append(scaler.scale)
        return f"the last rank overflows in the second step: {scales}"

    def task_3() -> str:
        weight = np.ones(1, np.float16)
        optimizer = MasterWeights([weight], rate=1e-4)
        for _ in range(20):
            optimizer.step([np.array([1024.0], np.float16)], scale=1024.0, limit=1.0)
        return f"1 - 20 * 0.0001 is {weight}, its master {optimizer.masters[0]}"

    def task_4() -> str:
        x = np.array([0.001, 0.3, 3.0, 300.0, 3000.0], np.float32)
        return f"{x} is {quantize(x, 1.0)}; 3000 needs the scale {scale_for(3000.0)}"

    def task_5() -> str:
        scale = DelayedScale(comm, history=2)
        scales = []
        for step in range(4):
            scales.append(scale.cast(np.array([2.0**step * (comm.rank + 1)], np.float32))[1])
            scale.update()
        return f"a tensor that doubles each step gets the scales {scales}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
