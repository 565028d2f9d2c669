"""Lesson 05: ZeRO 1 and 2. Every rank has all parameters, but optimizer state and gradients of only
one slice of them.

    data parallelism   all-reduce gradients                                ─▶ every rank updates all parameters
    ZeRO               reduce-scatter gradients ─▶ rank r updates slice r  ─▶ all-gather parameters

Fill in everything that raises `NotImplementedError`; the docstrings are the contract. You need
torch and three collectives of the package:

    reduce_scatter(flat, comm)           returns this rank's slice of the sum of all ranks' `flat`; `flat` is unchanged
    all_gather(mine, comm, out=flat)     fills `flat`, on every rank, with all ranks' slices one after the other
    all_reduce(tensor, comm)             every rank's tensor becomes the sum over all ranks, in place

`flat` is one-dimensional. `mine` may be a view of its own place in `flat`. Slices are those of
`torch.tensor_split(flat, comm.size)`: their lengths differ by one where P does not divide, and a
slice may be empty, so you need no padding. `parameter.detach().view(-1)` is a parameter's own
memory, as a flat tensor. You are building parts of `minidist.full`, `minidist.full.memory` and
`minidist.plan`, so calling them scores nothing, and neither does torch's ZeroRedundancyOptimizer.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 05             points, and what is still wrong
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401


def largest_model(memory: int, ranks: int, stage: int, recipe: str) -> int:
    """Task 1, first half: return the largest number of parameters that fits into `memory` bytes on
    each of the ranks.

    Parameters
    ----------
    memory, ranks : int
        The bytes of one rank, and the number of ranks. Count parameters, gradients and optimizer
        state, as the lesson's table does; count no activations.
    stage : int
        0 is plain data parallelism. Stage 1 cuts the optimizer state (a master copy is part of it)
        into one slice for each rank. Stage 2 cuts the gradients as well, and stage 3 the parameters
        as well.
    recipe : str
        - `"mixed"`: as in the lesson. Parameters and gradients in 16 bits; master copy and two
          moments in 32 bits.
        - `"float32"`: all in 32 bits: parameters, gradients and the two moments. There is no master
          copy.
        - `"8-bit moments"`: as `"mixed"`, but each of the two moments takes one byte.

    Bytes that are cut need not be divisible by the number of ranks: count 1/ranks of them for each
    rank, even if this is a fraction. Return a whole number, the largest that fits: with one more
    parameter it would not.
    """
    raise NotImplementedError("task 1 is not started")


def fewest_ranks(parameters: int, memory: int, stage: int, recipe: str) -> int | None:
    """Task 1, second half: return the smallest number of ranks on which `parameters` parameters
    fit; None if none does.

    The other arguments are those of the first half.
    """
    raise NotImplementedError("task 1 is not started")


class ZeRO1:
    """Task 2: AdamW with its state sharded over the ranks.

        zero.zero_grad() ─▶ forward, backward ─▶ zero.reduce() ─▶ zero.step()

    Parameters
    ----------
    model
        Its parameters are equal on all ranks. Its gradients differ from rank to rank, and have to
        be summed.
    comm, lr
        The ranks, and the learning rate; AdamW's other options are torch's defaults.

    Attributes
    ----------
    slices : list[nn.Parameter]
        This rank's slice of each parameter of the model, in the order of the parameters: flat, and
        perhaps empty. A slice may be a view of the parameter's own memory, which costs nothing, or
        a copy of only these elements.
    adamw : torch.optim.AdamW
        The optimizer of the slices, and of nothing else. This makes its state P times smaller.

    Every parameter gets a gradient in every backward. Besides the model and its gradients, a rank
    holds only the slices, their gradients and AdamW's state, each P times smaller than whole: no
    copy of the model, and no other whole gradient. (A view keeps its whole base tensor alive: a
    slice of a copy of a parameter keeps the whole copy.) In a step all ranks together send 2 (P -
    1) times the bytes of the model, as an all-reduce of the gradients would.
    """

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.slices: list[nn.Parameter] = []
        raise NotImplementedError("task 2 is not started")

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        raise NotImplementedError("task 2 is not started")

    def reduce(self) -> None:
        """Set the gradient of each slice to the sum over the ranks, with one reduce-scatter for
        each parameter.
        """
        raise NotImplementedError("task 2 is not started")

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        raise NotImplementedError("task 2 is not started")


class ZeRO2:
    """Task 3: as in task 2, but at no time does a rank hold all gradients.

    Arguments, attributes and methods are those of `ZeRO1`; you may build on your class.

    After `parameter.register_post_accumulate_grad_hook(function)`, autograd calls
    `function(parameter)` when it has put a gradient into `parameter.grad`: during backward, and for
    the models of this exercise in the same order on all ranks. The function must return None. In
    it, reduce-scatter this one gradient, *add* the result to the slice's gradient, and free the
    whole gradient: set `parameter.grad` to None, and keep no other reference to it and no copy. It
    must be free when the next gradient arrives. You have to add because several backwards may run
    between `zero_grad` and `step`.
    """

    def __init__(self, model: nn.Module, comm: Communicator, lr: float) -> None:
        self.slices: list[nn.Parameter] = []
        raise NotImplementedError("task 3 is not started")

    def zero_grad(self) -> None:
        """Forget the gradients of the model and of the slices."""
        raise NotImplementedError("task 3 is not started")

    def reduce(self) -> None:
        """Wait for the reduce-scatters that are still under way. (If they have all ended in the
        hooks, do nothing.)
        """
        raise NotImplementedError("task 3 is not started")

    def step(self) -> None:
        """Update the slices, and gather the model's parameters from all ranks' slices."""
        raise NotImplementedError("task 3 is not started")


def clip(slices: list[nn.Parameter], limit: float, comm: Communicator) -> Tensor:
    """Task 4: scale the gradients of all slices so that the norm of the whole gradient is at most
    `limit`.

    Parameters
    ----------
    slices
        This rank's slices, each with a gradient in `slice.grad`. Scale the gradients in place. Some
        or all slices of a rank may be empty; such a rank takes part like any other.
    limit : float
        Multiply all gradients by min(1, limit / (norm + 1e-6)): the same factor on every rank.

    Return the norm before scaling, as a tensor without dimensions, the same on every rank: the
    square root of the sum of the squares of all gradient elements, over all slices of all ranks. If
    the norm is infinite or NaN, change no gradient on any rank. Send only one all-reduce of one
    number, however many slices there are.
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
    rows = torch.randn(
        comm.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )

    def trained(kind: type[ZeRO1] | type[ZeRO2]) -> str:
        model = example()
        zero = kind(model, comm, lr=0.1)
        zero.zero_grad()
        model(rows[comm.rank]).square().sum().backward()
        zero.reduce()
        zero.step()
        held = sum(
            value.numel()
            for state in zero.adamw.state.values()
            for value in state.values()
            if value.dim()
        )
        return (
            f"{held} numbers of state, the first weight is "
            f"{next(model.parameters()).flatten()[0].item():.6f}"
        )

    def task_1() -> str:
        recipes = ("mixed", "float32", "8-bit moments")
        fits = [f"{largest_model(24 * 10**9, 16, 1, recipe) / 1e9:.2f}" for recipe in recipes]
        ranks = [fewest_ranks(5 * 10**9, 24 * 10**9, stage, "mixed") for stage in range(4)]
        return (
            f"{', '.join(fits)} billion parameters fit 16 GPUs of 24 GB, 5 billion fit "
            f"{ranks} of them in stage 0 to 3"
        )

    def task_4() -> str:
        piece = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        piece.grad = torch.full((2,), 3.0, dtype=torch.float64)
        return (
            f"the norm is {clip([piece], 1.0, comm).item():.6f}, gradients become "
            f"{piece.grad.tolist()}"
        )

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
