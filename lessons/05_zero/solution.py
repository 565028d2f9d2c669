"""Lesson 05, solved with the package: `zero.py` of the book and of `full/zero/`, `full/clip.py`,
`plan/equation.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.clip import clip_by_global_norm
from minidist.full.zero import zero
from minidist.plan import equation
from minidist.zero import Unit

EACH = {
    "mixed": equation.MIXED_PRECISION_ADAM,
    "float32": equation.SINGLE_PRECISION_ADAM,
    "8-bit moments": equation.ModelStates(2, 2, 6),
}


def largest_model(memory: int, ranks: int, stage: int, recipe: str) -> int:
    """Return how many parameters fit."""
    return int(memory / equation.model_states(1, ranks, stage, EACH[recipe]).total)


def fewest_ranks(parameters: int, memory: int, stage: int, recipe: str) -> int | None:
    """Return how many ranks are enough: two ranks halve the bytes that are cut, which tells how
    many these are.
    """
    one, two = (
        equation.model_states(parameters, ranks, stage, EACH[recipe]).total for ranks in (1, 2)
    )
    cut = 2 * (one - two)
    left = memory - (one - cut)
    if cut == 0:
        return 1 if left >= 0 else None
    return math.ceil(cut / left) if left > 0 else None


class ZeRO1:
    """The book's units, of one parameter each."""

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.model = model
        self.units = [Unit([parameter], comm) for parameter in model.parameters()]
        self.slices = [unit.shard for unit in self.units]
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        self.model.zero_grad()
        self.adamw.zero_grad()

    def reduce(self) -> None:
        """Set the gradient of each slice; a unit of the package adds to what is there."""
        self.adamw.zero_grad()
        for unit in self.units:
            unit.reduce_scatter()

    def step(self) -> None:
        """Update the slices, and gather the parameters."""
        self.adamw.step()
        for unit in self.units:
            unit.unshard()


class ZeRO2(zero.ZeRO2):
    """The package's, every parameter a bucket. It reduces during backward."""

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        super().__init__(model, comm, op="sum", bucket_bytes=1, first_bucket_bytes=1)
        self.adamw = self.optimizer(torch.optim.AdamW, lr=lr)

    def reduce(self) -> None:
        """Reduce the gradients that no backward has reduced."""
        self.synchronize()

    def step(self) -> None:
        """Update the slices; the optimizer gathers when it has stepped."""
        self.adamw.step()


def clip(slices: list[nn.Parameter], limit: float, comm: Communicator) -> Tensor:
    """Clip by the norm over the ranks of `comm`."""
    return clip_by_global_norm(slices, limit, comm)
