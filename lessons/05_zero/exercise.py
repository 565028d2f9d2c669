"""Lesson 05: ZeRO 1 and 2: every rank computes with all parameters, and keeps the rest for a part of them only.

    data parallelism   all-reduce gradients                                ─▶ every rank updates all parameters
    ZeRO               reduce-scatter gradients ─▶ rank r updates slice r  ─▶ all-gather parameters

Fill in what raises; the docstrings are the contract. You need torch, and of the package three collectives:

    reduce_scatter(flat, comm)           returns this rank's slice of the sum of all ranks' `flat`, which stays as it is
    all_gather(mine, comm, out=flat)     fills `flat`, on every rank, with all ranks' slices one after the other
    all_reduce(tensor, comm)             every rank's tensor becomes the sum over all ranks, in place

`flat` is one-dimensional. Slices are those of `torch.tensor_split(flat, comm.size)`: they differ by one element where P
does not divide, and may be empty; so nothing needs to be padded. `parameter.detach().view(-1)` is a parameter's own
memory, flat. `minidist.parallel` and `minidist.memory` are what you are building: calling them scores nothing, and
neither does torch's ZeroRedundancyOptimizer.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 05             points, and what is still wrong
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401


def model_states(parameters: int, ranks: int, stage: int) -> tuple[float, float, float]:
    """Task 1, first half: return the bytes that a rank holds of parameters, of gradients, and for the optimizer.

    Mixed precision with Adam: parameters and gradients in 16 bits; in 32 bits a master copy of the parameters and
    Adam's two moments. Stage 0 is plain data parallelism; stage 1 cuts the optimizer's part (the master copy too) into
    one slice for each rank, stage 2 the gradients as well, and stage 3 the parameters as well. What is cut need not
    divide: return the mean over the ranks.
    """
    raise NotImplementedError("task 1 is not started")


def largest_model(memory: float, ranks: int, stage: int) -> int:
    """Task 1, second half: return how many parameters fit, by the first half, into `memory` bytes on each rank."""
    raise NotImplementedError("task 1 is not started")


class ZeRO1:
    """Task 2: AdamW whose state is spread over the ranks.

        zero.zero_grad() ─▶ forward, backward ─▶ zero.reduce() ─▶ zero.step()

    Parameters
    ----------
    model
        Its parameters are equal on all ranks. Its gradients are this rank's own, and have to be summed.
    comm, lr
        The ranks, and the learning rate; AdamW's other options are torch's defaults.

    Attributes
    ----------
    slices : list[nn.Parameter]
        For each parameter of the model, in its order, this rank's slice of it: flat, and perhaps empty.
    adamw : torch.optim.AdamW
        Over the slices, and nothing else: this is what makes its state P times smaller.

    In a step all ranks together send 2 (P - 1) times the bytes of the model: as an all-reduce of the gradients would.
    """

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.slices: list[nn.Parameter] = []
        raise NotImplementedError("task 2 is not started")

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        raise NotImplementedError("task 2 is not started")

    def reduce(self) -> None:
        """Give each slice its gradient: the sum over the ranks, by one reduce-scatter for each parameter."""
        raise NotImplementedError("task 2 is not started")

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        raise NotImplementedError("task 2 is not started")


class ZeRO2:
    """Task 3: as task 2, but no rank holds all gradients at any time.

    Arguments, attributes and methods are those of `ZeRO1`; you may build on your class.

    `parameter.register_post_accumulate_grad_hook(function)` has autograd call `function(parameter)`, which returns
    nothing, when it has put a gradient into `parameter.grad`: in the midst of backward, in the same order on all ranks
    here. Reduce-scatter this one gradient then and there, *add* what comes to the slice's gradient, and free the whole
    one: set `parameter.grad` to None and keep no other reference to it. When the next gradient comes it has to be gone.
    Adding matters where several backwards run between `zero_grad` and `step`.
    """

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.slices: list[nn.Parameter] = []
        raise NotImplementedError("task 3 is not started")

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        raise NotImplementedError("task 3 is not started")

    def reduce(self) -> None:
        """Wait for what is under way, if anything is."""
        raise NotImplementedError("task 3 is not started")

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        raise NotImplementedError("task 3 is not started")


def clip(slices: list[nn.Parameter], limit: float, comm: Communicator) -> Tensor:
    """Task 4: scale the gradients of all slices so that the norm of the whole gradient is at most `limit`.

    Parameters
    ----------
    slices
        This rank's, each with a gradient in `slice.grad`, which is to be scaled in place. Some may be empty.
    limit : float
        Gradients are multiplied by min(1, limit / (norm + 1e-6)): the same factor on every rank.

    Returns the norm before, a scalar tensor, the same on every rank: the root of the sum of all squares, over all
    slices of all ranks. If it is infinite or not a number, no gradient is changed. One all-reduce of one number is all
    that is sent.
    """
    raise NotImplementedError("task 4 is not started")


def example() -> nn.Module:
    """Return a small model in float64, the same on each rank."""
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    rows = torch.randn(comm.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def trained(kind: type[ZeRO1] | type[ZeRO2]) -> str:
        model = example()
        zero = kind(model, comm, lr=0.1)
        zero.zero_grad()
        model(rows[comm.rank]).square().sum().backward()
        zero.reduce()
        zero.step()
        held = sum(value.numel() for state in zero.adamw.state.values() for value in state.values() if value.dim())
        return f"{held} numbers of state, the first weight is {next(model.parameters()).flatten()[0].item():.6f}"

    def task_1() -> str:
        fits = [f"{largest_model(80e9, 64, stage) / 1e9:.1f}" for stage in range(4)]
        return f"{', '.join(fits)} billion parameters fit 64 GPUs of 80 GB"

    def task_4() -> str:
        piece = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        piece.grad = torch.full((2,), 3.0, dtype=torch.float64)
        return f"the norm is {clip([piece], 1.0, comm).item():.6f}, gradients become {piece.grad.tolist()}"

    tasks = (task_1, lambda: trained(ZeRO1), lambda: trained(ZeRO2), task_4)
    for number, task in enumerate(tasks, start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
