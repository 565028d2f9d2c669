"""Lesson 05, solved by hand from the handout: ZeRO 1 and 2, and the norm of a gradient that lies in slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, reduce_scatter


def model_states(parameters: int, ranks: int, stage: int) -> tuple[float, float, float]:
    """Task 1, first half: return the bytes that a rank holds of parameters, of gradients, and for the optimizer."""
    return (
        2 * parameters / (ranks if stage >= 3 else 1),
        2 * parameters / (ranks if stage >= 2 else 1),
        12 * parameters / (ranks if stage >= 1 else 1),
    )


def largest_model(memory: float, ranks: int, stage: int) -> int:
    """Task 1, second half: return how many parameters fit, by the first half, into `memory` bytes on each rank."""
    about = int(memory / sum(model_states(1, ranks, stage)))  # rounding may make it one too many, or too few
    return max(n for n in (about - 1, about, about + 1) if sum(model_states(n, ranks, stage)) <= memory)


class ZeRO1:
    """Task 2: AdamW whose state is spread over the ranks."""

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.model, self.comm = model, comm
        self.slices: list[nn.Parameter] = []
        for parameter in model.parameters():
            mine = parameter.detach().view(-1).tensor_split(comm.size)[comm.rank]  # the parameter's own memory
            self.slices.append(nn.Parameter(mine))
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        self.model.zero_grad()
        self.adamw.zero_grad()

    def reduce(self) -> None:
        """Give each slice its gradient: the sum over the ranks, by one reduce-scatter for each parameter."""
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
    """Task 4: scale the gradients of all slices so that the norm of the whole gradient is at most `limit`."""
    squares = torch.stack([mine.grad.square().sum() for mine in slices]).sum().reshape(1)
    all_reduce(squares, comm)
    norm = squares.sqrt().squeeze()
    if norm.isfinite():
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for mine in slices:
            mine.grad *= factor
    return norm
