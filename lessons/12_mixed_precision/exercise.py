"""Lesson 12: mixed precision. Compute in 16 or 8 bits, and keep the weights in 32.

                sign  exponent  mantissa     largest    next above 1
    float32        1         8        23      3.4e38    1 + 2^-23
    bfloat16       1         8         7      3.4e38    1 + 2^-7
    float16        1         5        10       65504    1 + 2^-10
    float8 E4M3    1         4         3         448    1 + 2^-3

Fill in the functions and classes; their docstrings are the contract. You need numpy alone, and one
collective:

    all_reduce(array, comm, op="max")      replaces each element of every rank's array by the largest that any rank has
                                           there; the array has at least one dimension

numpy has float16. It has neither bfloat16 nor float8: you compute their numbers from float32
yourself. You are building what `minidist.full.memory` and torch's conversions do, so calling anything of
`minidist.full.memory` or of torch scores nothing. Leave arguments as they are, unless a
docstring says that you change them.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 12             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import minidist
from minidist import Communicator
from minidist.full.collectives import all_reduce  # noqa: F401

Array = np.ndarray[Any, Any]


def to_bfloat16(x: Array) -> Array:
    """Task 1: round each element of `x` to the nearest bfloat16; return their bits.

    The 16 bits of a bfloat16 are the upper half of the 32 bits of a float32: `x.view(np.uint32) >>
    16` cuts the lower half off. To round to the nearest, add the right number to the 32 bits before
    you cut.

    Parameters
    ----------
    x : float32 array
        Of any shape, with any values, infinities and NaNs among them.

    Returns
    -------
    uint16 array of the shape of `x`
        The 16 bits of the nearest bfloat16 of each element:

        - Where two bfloat16 are equally near, take the one whose last bit is 0.
        - A number that rounds up beyond the largest bfloat16 becomes infinity. Infinity stays
          infinity, -0 stays -0.
        - NaN (not a number) stays NaN, even if only bits of its lower half make it NaN. Any bit
          pattern of a NaN will do.
    """
    raise NotImplementedError("task 1 is not started")


def round_at_random(x: Array, random: np.random.Generator) -> Array:
    """Task 1, second half: round each element of `x` at random to one of the two bfloat16 around
    it; return their bits.

    The probabilities are such that the expected value of the result is `x` itself: a number that
    lies a quarter of the way from the lower neighbour to the upper one goes up with probability
    1/4. A number that is a bfloat16 already stays as it is.

    Parameters
    ----------
    x : float32 array
        Finite, and smaller than 1e38 in magnitude.
    random
        The generator to draw from, as in `random.integers(...)`. Draw an independent number for
        each element. Do not create or seed a generator: the next call goes on drawing where this
        one ended.

    Returns
    -------
    uint16 array of the shape of `x`
        The 16 bits of the chosen bfloat16 of each element.
    """
    raise NotImplementedError("task 1 is not started")


class LossScaler:
    """Task 2: searches for the largest loss scale at which float16 gradients do not overflow.

    Parameters
    ----------
    comm : Communicator
        All ranks that train together.
    scale, growth, backoff, interval
        `scale`, at least 1, is the first loss scale. After an overflow it is multiplied by
        `backoff`. After `interval` steps in a row without overflow, counted from its last change,
        it is multiplied by `growth`.

    Attributes
    ----------
    scale : float
        The number by which the next loss is to be multiplied.
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
        """Return True if any element of the `gradients` (float16) of any rank is infinite or NaN,
        else False.

        Every rank returns the same answer. The call costs one all-reduce of one number, however
        many gradients there are.
        """
        raise NotImplementedError("task 2 is not started")

    def update(self, overflow: bool) -> None:
        """Set `self.scale` for the next step. A scale that would become smaller than 1 becomes 1.

        Parameters
        ----------
        overflow : bool
            What `overflowed` returned for the step that ends.

        Raises
        ------
        FloatingPointError
            If there is an overflow although the scale is 1 already: then the scale is not the
            cause.
        """
        raise NotImplementedError("task 2 is not started")


class MasterWeights:
    """Task 3: plain gradient descent on float32 copies of float16 weights.

    Parameters
    ----------
    weights : sequence of float16 arrays
        The arrays with which the model computes. They stay the same objects; change them in place.
    rate : float
        The learning rate.

    Attributes
    ----------
    masters : list of float32 arrays
        At first copies of the weights. After each step the weights are the masters, rounded to the
        nearest (`astype`).
    """

    masters: list[Array]

    def __init__(self, weights: Sequence[Array], rate: float) -> None:
        raise NotImplementedError("task 3 is not started")

    def step(self, gradients: Sequence[Array], scale: float, limit: float) -> float:
        """Update masters and weights; return the joint norm of the unscaled gradients before
        clipping.

        Parameters
        ----------
        gradients : sequence of float16 arrays
            The gradients of the loss times `scale`, one for each weight, all finite. Do not change
            them. Unscale in float32: an unscaled gradient may be too small for float16.
        limit : float
            If the joint norm of all unscaled gradients is larger than `limit`, multiply all of them
            by limit / norm. Compute in float32: the square of a float16 is easily larger than
            65504.
        """
        raise NotImplementedError("task 3 is not started")


def scale_for(amax: float) -> float:
    """Task 4: return the largest power of two that, times `amax` > 0, is at most 448.

    The scale is a power of two because multiplying and dividing by a power of two rounds nothing.
    """
    raise NotImplementedError("task 4 is not started")


def quantize(x: Array, scale: float) -> Array:
    """Task 4, second half: return, as float32, the E4M3 number that is nearest to each element of
    `x * scale`.

    E4M3 has the numbers (1 + m/8) 2^e with m = 0 to 7 and e = -6 to 8, up to 448 = (1 + 6/8) 2^8.
    Below 2^-6 it has the multiples of 2^-9. It also has the negative of all these numbers. It has
    no infinity.

    - Where two are equally near, take the one with the even m (or the even multiple).
    - For a magnitude beyond 448, take 448 (or -448).

    Parameters
    ----------
    x : float32 array
        Finite. `x * scale` is finite, too.
    """
    raise NotImplementedError("task 4 is not started")


class DelayedScale:
    """Task 5: the scale of one tensor, computed from its largest magnitudes (amax) in the last
    steps.

    Parameters
    ----------
    comm : Communicator
        All ranks that hold shards of the tensor or rows of it.
    history : int
        How many of the last steps count for the scale.
    """

    def __init__(self, comm: Communicator, history: int) -> None:
        raise NotImplementedError("task 5 is not started")

    def cast(self, x: Array) -> tuple[Array, float]:
        """Return `quantize(x, scale)` and the scale. No messages.

        The scale is `scale_for(amax)`, where amax is the largest amax of the last `history` steps
        over all ranks. The present `x` does not influence it, with one exception: before the first
        `update` there is no past, so amax is then this rank's own amax of this `x`. No amax is 0.

        Remember the amax of `x` for `update`. `cast` may be called several times in a step.
        """
        raise NotImplementedError("task 5 is not started")

    def update(self) -> None:
        """End a step: append its amax to the history, and drop the oldest one where there are more
        than `history`.

        The amax of a step is the largest over all ranks and all casts of this step. The call costs
        one all-reduce of one number.
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
