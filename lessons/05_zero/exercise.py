"""Lesson 05: ZeRO 1 and 2: every rank computes with all parameters, and keeps the rest for a part of them only.

    data parallelism   all-reduce gradients                                ─▶ every rank updates all parameters
    ZeRO               reduce-scatter gradients ─▶ rank r updates slice r  ─▶ all-gather parameters

Fill in what raises; the docstrings are the contract. You need torch, and of the package three collectives:

    reduce_scatter(flat, comm)           returns this rank's slice of the sum of all ranks' `flat`, which stays as it is
    all_gather(mine, comm, out=flat)     fills `flat`, on every rank, with all ranks' slices one after the other
    all_reduce(tensor, comm)             every rank's tensor becomes the sum over all ranks, in place

`flat` is one-dimensional; `mine` may be the very part of it that it fills. Slices are those of
`torch.tensor_split(flat, comm.size)`: they differ by one element where P does not divide, and may be empty; so nothing
needs to be padded. `parameter.detach().view(-1)` is a parameter's own memory, flat. `minidist.parallel` and
`minidist.memory` are what you are building: calling them scores nothing, and neither does torch's
ZeroRedundancyOptimizer.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 05             points, and what is still wrong
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401


def largest_model(memory: int, ranks: int, stage: int, recipe: str) -> int:
    """Task 1, first half: return how many parameters fit, at most, into `memory` bytes on each of the ranks.

    Parameters
    ----------
    memory, ranks : int
        Bytes of one rank, and how many ranks there are. Only what the text's table is about counts: no activations.
    stage : int
        0 is plain data parallelism. Stage 1 cuts the optimizer's part into one slice for each rank (a master copy is a
        part of it), stage 2 the gradients as well, and stage 3 the parameters as well.
    recipe : str
        - `"mixed"`: the text's. Parameters and gradients in 16 bits, in 32 bits a master copy and Adam's two moments.
        - `"float32"`: all in 32 bits: parameters, gradients and the two moments. There is no master copy.
        - `"8-bit moments"`: as `"mixed"`, but each of the two moments takes one byte.

    What is cut need not divide: a rank holds the mean over the ranks, a fraction perhaps. The answer is a whole number:
    one parameter more would not fit.
    """
    raise NotImplementedError("task 1 is not started")


def fewest_ranks(parameters: int, memory: int, stage: int, recipe: str) -> int | None:
    """Task 1, second half: return on how many ranks, at least, so many parameters fit; None if on no number of them.

    The arguments are those of the first half.
    """
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
        For each parameter of the model, in its order, this rank's slice of it: flat, and perhaps empty. It may be a
        view of the parameter's own memory, which costs nothing, or a copy of these elements alone.
    adamw : torch.optim.AdamW
        Over the slices, and nothing else: this is what makes its state P times smaller.

    Every parameter gets a gradient in every backward. Besides the model and its gradients, a rank keeps the slices,
    their gradients and AdamW's state, each of them P times smaller, and nothing else: no copy of the model, no other
    whole gradient. (A view keeps the whole of what it is a view of: a slice of a copy of a parameter keeps that copy.)
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
    nothing, when it has put a gradient into `parameter.grad`: in the midst of backward, and for the models of this
    exercise in the same order on all ranks. Reduce-scatter this one gradient then and there, *add* what comes to the
    slice's gradient, and free the whole one: set `parameter.grad` to None, and keep no other reference to it and no
    copy. When the next gradient comes it has to be gone. Adding matters where several backwards run between `zero_grad`
    and `step`.
    """

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.slices: list[nn.Parameter] = []
        raise NotImplementedError("task 3 is not started")

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        raise NotImplementedError("task 3 is not started")

    def reduce(self) -> None:
        """Wait for what is under way. (After reduce-scatters that wait by themselves nothing is: then do nothing.)"""
        raise NotImplementedError("task 3 is not started")

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        raise NotImplementedError("task 3 is not started")


def clip(slices: list[nn.Parameter], limit: float, comm: Communicator) -> Tensor:
    """Task 4: scale the gradients of all slices so that the norm of the whole gradient is at most `limit`.

    Parameters
    ----------
    slices
        This rank's, each with a gradient in `slice.grad`, which is to be scaled in place: the same tensor, with other
        values. Some slices may be empty, or all of a rank, who takes part all the same.
    limit : float
        Gradients are multiplied by min(1, limit / (norm + 1e-6)): the same factor on every rank.

    Returns the norm before, a tensor without dims, the same on every rank: the root of the sum of all squares, over all
    slices of all ranks. If it is infinite or not a number, no gradient is changed, on any rank. One all-reduce of one
    number is all that is sent, however many slices there are.
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
        recipes = ("mixed", "float32", "8-bit moments")
        fits = [f"{largest_model(24 * 10**9, 16, 1, recipe) / 1e9:.2f}" for recipe in recipes]
        ranks = [fewest_ranks(5 * 10**9, 24 * 10**9, stage, "mixed") for stage in range(4)]
        return (
            f"{', '.join(fits)} billion parameters fit 16 GPUs of 24 GB, 5 billion fit {ranks} of them in stage 0 to 3"
        )

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
