"""Lesson 05, solved by hand from the handout: ZeRO 1 and 2, and the norm of a gradient that lies in
slices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter

RECIPES = {  # bytes of one parameter: itself, its gradient, the optimizer's
    "mixed": (2, 2, 4 + 4 + 4),
    "float32": (4, 4, 4 + 4),
    "8-bit moments": (2, 2, 4 + 1 + 1),
}


def on_every_rank(stage: int, recipe: str) -> tuple[int, int]:
    """Return (bytes of a parameter that every rank holds, bytes that are divided by the ranks)."""
    parameter, gradient, optimizer = RECIPES[recipe]
    cut = optimizer * (stage >= 1) + gradient * (stage >= 2) + parameter * (stage >= 3)
    return parameter + gradient + optimizer - cut, cut


def largest_model(memory: int, ranks: int, stage: int, recipe: str) -> int:
    """Task 1, first half: return how many parameters fit, at most, into `memory` bytes on each of
    the ranks.
    """
    whole, cut = on_every_rank(stage, recipe)
    return memory * ranks // (whole * ranks + cut)


def fewest_ranks(parameters: int, memory: int, stage: int, recipe: str) -> int | None:
    """Task 1, second half: return on how many ranks, at least, so many parameters fit; None if on
    no number of them.
    """
    whole, cut = on_every_rank(stage, recipe)
    left = memory - whole * parameters  # for what is cut
    if cut == 0:
        return 1 if left >= 0 else None
    return -(-cut * parameters // left) if left > 0 else None


class ZeRO1:
    """Task 2: AdamW whose state is spread over the ranks."""

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.model, self.comm = model, comm
        self.slices: list[nn.Parameter] = []
        for parameter in model.parameters():
            # the parameter's own memory
            mine = parameter.detach().view(-1).tensor_split(comm.size)[comm.rank]
            self.slices.append(nn.Parameter(mine))
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        self.model.zero_grad()
        self.adamw.zero_grad()

    def reduce(self) -> None:
        """Give each slice its gradient: the sum over the ranks, by one reduce-scatter for each
        parameter.
        """
        for parameter, mine in zip(self.model.parameters(), self.slices, strict=True):
            mine.grad = reduce_scatter(parameter.grad.view(-1), self.comm)

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        self.adamw.step()
        for parameter, mine in zip(self.model.parameters(), self.slices, strict=True):
            all_gather(mine.detach(), self.comm, out=parameter.detach().view(-1))


class ZeRO2(ZeRO1):
    """Task 3: as task 2, but no rank holds all gradients at any time."""

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        super().__init__(model, comm, lr)
        self.slice_of = dict(zip(model.parameters(), self.slices, strict=True))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter: nn.Parameter) -> None:
        """Add this rank's slice of the summed gradient to the slice's, and free the whole one."""
        mine = self.slice_of[parameter]
        gradient = reduce_scatter(parameter.grad.view(-1), self.comm)
        parameter.grad = None
        mine.grad = gradient if mine.grad is None else mine.grad + gradient

    def reduce(self) -> None:
        """Nothing is under way: every gradient was reduced when it came."""


def clip(slices: list[nn.Parameter], limit: float, comm: Communicator) -> Tensor:
    """Task 4: scale the gradients of all slices so that the norm of the whole gradient is at most
    `limit`.
    """
    squares = torch.stack([mine.grad.square().sum() for mine in slices]).sum().reshape(1)
    all_reduce(squares, comm)
    norm = squares.sqrt().squeeze()
    if norm.isfinite():
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for mine in slices:
            mine.grad *= factor
    return norm
