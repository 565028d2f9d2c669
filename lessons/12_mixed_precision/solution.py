"""Lesson 12, solved: torch's rounding, and `minidist/full/precision`: mixed.py, masters.py,
fp8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.clip import clip_by_global_norm
from minidist.full.collectives import all_reduce
from minidist.full.precision import fp8, masters, mixed, rounding

Array = np.ndarray[Any, Any]


def to_bfloat16(x: Array) -> Array:
    """Return the bits of the nearest bfloat16, as uint16."""
    return bits_of(torch.tensor(x).bfloat16())


def round_at_random(x: Array, random: np.random.Generator) -> Array:
    """Return the bits of one of the two bfloat16 around each element, as uint16."""
    generator = torch.Generator().manual_seed(int(random.integers(1 << 63)))
    return bits_of(rounding.stochastic_round(torch.tensor(x), generator))


def bits_of(x: Tensor) -> Array:
    """Return the bits of bfloat16, as uint16."""
    return x.view(torch.int16).numpy().view(np.uint16)


class LossScaler(mixed.LossScaler):
    """Finds the largest loss scale that float16 gradients bear."""

    def overflowed(self, gradients: Sequence[Array]) -> bool:  # type: ignore[override]
        """Tell whether on any rank any element is infinite or not a number."""
        norms = [torch.linalg.vector_norm(torch.tensor(gradient).float()) for gradient in gradients]
        return super().overflowed(torch.linalg.vector_norm(torch.stack(norms)))


class MasterWeights:
    """Gradient descent on float32 copies of float16 weights."""

    def __init__(self, weights: Sequence[Array], rate: float) -> None:
        self.parameters = [nn.Parameter(torch.from_numpy(weight)) for weight in weights]
        self.optimizer = masters.MasterWeights(self.parameters, torch.optim.SGD, lr=rate)

    def step(self, gradients: Sequence[Array], scale: float, limit: float) -> float:
        """Update masters and weights; return the norm of the unscaled gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        norm = float(clip_by_global_norm(self.parameters, 0)) / scale
        self.optimizer.step(factor=min(1.0, limit / norm) / scale)
        return norm

    @property
    def masters(self) -> list[Array]:
        """The float32 copies."""
        states = [self.optimizer.state_of(parameter) for parameter in self.parameters]
        return [state["master"].numpy() for state in states]


def scale_for(amax: float) -> float:
    """Return the largest power of two that brings `amax` to at most 448."""
    return float(fp8.scale_for(torch.tensor(amax, dtype=torch.float32), fp8.E4M3))


def quantize(x: Array, scale: float) -> Array:
    """Return the nearest numbers of E4M3, as float32."""
    return fp8.quantize(torch.tensor(x), fp8.E4M3, scale).float().numpy()


class DelayedScale:
    """The scale of one tensor, by the amaxes of its last steps."""

    def __init__(self, comm: Communicator, history: int) -> None:
        self.comm, self.scale = comm, fp8.DelayedScale(fp8.E4M3, history, torch.device("cpu"))

    def cast(self, x: Array) -> tuple[Array, float]:
        """Return `x` in float8, as float32, and its scale."""
        x8, scale = self.scale.cast(torch.tensor(x), learn=True)
        return x8.float().numpy(), float(scale)

    def update(self) -> None:
        """Let the history know the amax of this step."""
        amax = self.scale.amax.view(1).clone()
        all_reduce(amax, self.comm, op="max")
        self.scale.remember(amax[0])
