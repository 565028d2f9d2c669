"""Lesson 12 answered by hand, from the handout alone: rounding, the loss scale, master weights and
eight bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.full.collectives import all_reduce

Array = np.ndarray[Any, Any]


def to_bfloat16(x: Array) -> Array:
    """Task 1: return the bits of the bfloat16 that is nearest to each float32 of `x`, ties to
    even.
    """
    bits = x.view(np.uint32)
    upper = bits >> 16
    nearest = (bits.astype(np.uint64) + 0x7FFF + (upper & 1)) >> 16
    return np.where(np.isnan(x), upper | 0x40, nearest).astype(np.uint16)


def round_at_random(x: Array, random: np.random.Generator) -> Array:
    """Task 1, too: round up with the probability of the part that is cut off."""
    noise = random.integers(0, 2**16, size=x.shape, dtype=np.uint32)
    return ((x.view(np.uint32) + noise) >> 16).astype(np.uint16)


class LossScaler:
    """Task 2: finds the largest loss scale that float16 gradients bear."""

    scale: float

    def __init__(
        self,
        comm: Communicator,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        self.comm, self.scale = comm, scale
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.good_steps = 0  # in a row, since the scale last changed

    def overflowed(self, gradients: Sequence[Array]) -> bool:
        """Tell whether any element on any rank is infinite or not a number."""
        mine = any(not np.isfinite(gradient).all() for gradient in gradients)
        flag = np.array([mine], np.uint8)
        all_reduce(flag, self.comm, op="max")
        return bool(flag[0])

    def update(self, overflow: bool) -> None:
        """Choose the scale of the next step."""
        if overflow:
            if self.scale <= 1:
                raise FloatingPointError("the gradients overflow although the loss scale is 1")
            self.scale = max(1.0, self.scale * self.backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= self.growth
            self.good_steps = 0


class MasterWeights:
    """Task 3: plain gradient descent on float32 copies of float16 weights."""

    masters: list[Array]

    def __init__(self, weights: Sequence[Array], rate: float) -> None:
        self.weights, self.rate = list(weights), rate
        self.masters = [weight.astype(np.float32) for weight in weights]

    def step(self, gradients: Sequence[Array], scale: float, limit: float) -> float:
        """Update masters and weights; return the norm of the unscaled gradients before they were
        clipped.
        """
        unscaled = [gradient.astype(np.float32) / np.float32(scale) for gradient in gradients]
        norm = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in unscaled))
        factor = limit / norm if norm > limit else 1.0
        for weight, master, gradient in zip(self.weights, self.masters, unscaled, strict=True):
            master -= np.float32(self.rate) * (gradient * np.float32(factor))
            weight[...] = master.astype(np.float16)
        return norm


def scale_for(amax: float) -> float:
    """Task 4: return the largest power of two that, times `amax`, is at most 448."""
    # amax = mantissa * 2^exponent, 1/2 <= mantissa < 1; 448 = 7/8 * 2^9
    mantissa, exponent = math.frexp(amax)
    return math.ldexp(1.0, 9 - exponent if mantissa <= 7 / 8 else 8 - exponent)


def quantize(x: Array, scale: float) -> Array:
    """Task 4, too: return the number of float8 E4M3 that is nearest to each element of `x *
    scale`.
    """
    scaled = x.astype(np.float64) * scale
    _, exponent = np.frexp(scaled)  # |scaled| is at least 2^(exponent - 1)
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    nearest = np.rint(scaled / spacing) * spacing
    return np.clip(nearest, -448, 448).astype(np.float32)


class DelayedScale:
    """Task 5: the scale of one tensor, by the largest magnitudes that it had in the last steps."""

    def __init__(self, comm: Communicator, history: int) -> None:
        self.comm = comm
        self.past: deque[float] = deque(maxlen=history)
        self.present = 0.0  # the amax of this step's casts so far, on this rank

    def cast(self, x: Array) -> tuple[Array, float]:
        """Return `quantize(x, scale)` and the scale, which goes by the past."""
        own = float(np.abs(x).max(initial=0.0))
        self.present = max(self.present, own)
        amax = max(self.past) if self.past else own
        scale = scale_for(amax) if amax > 0 else 1.0
        return quantize(x, scale), scale

    def update(self) -> None:
        """End a step: the largest amax of all ranks enters the history."""
        amax = np.array([self.present], np.float32)
        all_reduce(amax, self.comm, op="max")
        self.past.append(float(amax[0]))
        self.present = 0.0
