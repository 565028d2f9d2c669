"""Lesson 09: a pipeline: cut a model into stages, plan who does what when, and carry the plan out.

    rank 0   F0 F1 F2 F3 ... B0 B1 B2 B3        rank r has stage r; F2 is the forward of microbatch 2 through it,
    rank 1   .. F0 F1 ...                       B2 its backward

A schedule is a list of such words for every rank. Fill in the five functions; their docstrings are the contract. The
package's own pipeline (`minidist.parallel`) is what you are building: calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 09             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator

Loss = Callable[[Tensor, Tensor], Tensor]


def cut_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Task 1: return which layers each stage gets, so that the most expensive stage is as cheap as it can be.

    Parameters
    ----------
    costs : sequence of float
        Of each layer; up to 60 layers. The cost of a stage is the sum over its layers.
    stages : int
        How many; at most as many as there are layers.

    Returns
    -------
    list of range
        One for each stage, in order: neighbouring layers, at least one, each layer in exactly one stage. Of several
        cuts that are equally good, any. To try all cuts takes years: from the best cuts of the first k layers into
        s stages follow those into s + 1. (The last stage begins at some layer j: try every j, and keep what you found.)
    """
    raise NotImplementedError("task 1 is not started")


def step_length(rows: Sequence[Sequence[str]], forward: float, backward: float) -> float:
    """Task 2: return how long a schedule takes, from 0 until every rank is done.

    Parameters
    ----------
    rows : sequence of sequences of str
        The words of each rank, in the order in which it does them. Rank r has stage r.
    forward, backward : float
        How long every F, and every B, takes. Messages take no time.

    A rank begins an action when it has ended the one before, and what the action needs has ended: F of a microbatch
    needs the same F of rank r - 1; B needs the rank's own F of that microbatch, and the same B of rank r + 1. The first
    rank has no r - 1, the last no r + 1.

    Raises
    ------
    ValueError
        If the ranks get stuck: nobody can begin the next action, and some rank is not done. It may wait in a circle of
        ranks, or for a word that is in nobody's row.
    """
    raise NotImplementedError("task 2 is not started")


def gpipe(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 3: return the words of `rank` under GPipe: all forwards, in order, then all backwards, in order."""
    raise NotImplementedError("task 3 is not started")


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the words of `rank` under 1F1B: after a warm-up, one forward and one backward in turn.

    Every microbatch once forward and once backward, both in order. The step is as long as with GPipe, whatever forward
    and backward cost; but at no time does rank r hold more than `ranks - r` microbatches whose forward it has done and
    whose backward it has not. `microbatches` may be smaller than `ranks`.
    """
    raise NotImplementedError("task 4 is not started")


def run_step(
    words: Sequence[str],
    stage: nn.Module,
    loss: Loss,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    comm: Communicator,
) -> float:
    """Task 5: carry out this rank's words; afterwards, every parameter of `stage` has its gradient in `.grad`.

    Parameters
    ----------
    words : sequence of str
        This rank's, from any schedule that can be run: each rank may take the microbatches in an order of its own. Do
        them in this order: one call of `stage`, one backward each.
    stage : nn.Module
        This rank's part of the model. What goes in and what comes out have the shape and dtype of `inputs[m]`.
    loss : callable
        `loss(output, target)`, a scalar, for the last rank. The gradients are those of the mean of all microbatches'
        losses.
    inputs, targets : sequences of Tensor
        One of each microbatch. Only the first rank's inputs and the last rank's targets hold data, the others NaN: use
        their shape and dtype.
    comm : Communicator
        Rank r has stage r; there may be one rank only.

    Returns
    -------
    float
        The mean of the losses on the last rank, 0.0 on the others.

    Messages
    --------
    For every microbatch one message to rank + 1 (the output) and one to rank - 1 (the gradient of the input), none
    else. `comm.send(tensor, to, tag)` waits until it is received, and so may never return if the other rank waits for
    you: `request = comm.isend(tensor, to, tag)` does not wait; leave the tensor as it is until `request.wait()` has
    returned. `comm.recv(tensor, source, tag)` fills a tensor of the right shape. With `tag=m` no two are mixed up:
    outputs and gradients travel in opposite directions. Do not wait for one send before you begin the next: the other
    rank may want them in another order. Return when every request has been waited for.

    Memory
    ------
    When B of a microbatch is done, its input and output are free: this rank keeps neither in a list, and autograd
    nothing of them. (By then the output has been received, for its gradient has come back: `wait` returns at once.)
    Gradients that are on their way to the rank before may stay until the end. (Every `.grad` is None when this is
    called.)

    You need `tensor.detach()`, `tensor.requires_grad_()` and `output.backward(gradient)`; when that has returned, the
    gradient of an input that requires one is in `input.grad`.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        return f"6 layers in 3 stages: {cut_layers([4, 1, 1, 1, 1, 4], 3)}"

    def task_2() -> str:
        return f"two ranks, one microbatch: {step_length([['F0', 'B0'], ['F0', 'B0']], 1, 2)}, expected 6"

    def task_3() -> str:
        return f"rank 0 of {comm.size}, 4 microbatches: {' '.join(gpipe(0, comm.size, 4))}"

    def task_4() -> str:
        return f"rank 0 of {comm.size}, 4 microbatches: {' '.join(one_forward_one_backward(0, comm.size, 4))}"

    def task_5() -> str:
        words = [f"{kind}{m}" for m in range(3) for kind in "FB"]  # one microbatch after the other: it needs no task 4
        stage = nn.Linear(2, 2, dtype=torch.float64)
        nn.init.eye_(stage.weight)
        nn.init.ones_(stage.bias)  # each stage adds 1
        inputs, targets = [[torch.full((1, 2), value, dtype=torch.float64)] * 3 for value in (0.0, comm.size + 2.0)]
        run_step(words, stage, nn.functional.mse_loss, inputs, targets, comm)
        return f"the gradient of rank 0's bias: {None if stage.bias.grad is None else stage.bias.grad.tolist()}" + (
            ", expected [-2.0, -2.0]"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
