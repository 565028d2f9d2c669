"""Lesson 09: a pipeline: cut a model into stages, write a schedule for the ranks, and run the
schedule.

    rank 0   F0 F1 F2 F3 ... B0 B1 B2 B3        rank r has stage r; F2 is the forward of microbatch 2 through this
    rank 1   .. F0 F1 ...                       stage, B2 the backward

`F2` is an action, written as one word. A schedule is a list of actions for every rank. Fill in the
five functions; their docstrings are the contract. You are building the package's own pipeline
(`minidist.full`), so calling it scores nothing.

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
    """Task 1: return which layers each stage gets, such that the most expensive stage is as cheap
    as possible.

    Parameters
    ----------
    costs : sequence of float
        The cost of each layer; up to 60 layers. The cost of a stage is the sum over its layers.
    stages : int
        The number of stages; at most the number of layers.

    Returns
    -------
    list of range
        One range for each stage, in order: neighbouring layers, at least one for each stage, and
        each layer in exactly one stage. If several cuts are equally good, return any of them. To
        try all cuts would take years. Instead, compute the best cuts of the first k layers into s +
        1 stages from the best cuts into s stages: the last stage begins at some layer j, so try
        every j. Store the results that you need again.
    """
    raise NotImplementedError("task 1 is not started")


def step_length(rows: Sequence[Sequence[str]], forward: float, backward: float) -> float:
    """Task 2: return how long a schedule takes: the time at which the last rank has finished, if
    all start at 0.

    Parameters
    ----------
    rows : sequence of sequences of str
        The actions of each rank, in the order in which the rank does them. Rank r has stage r.
    forward, backward : float
        The time of every F, and of every B. Messages take no time.

    A rank begins an action as soon as it has ended the one before, and all actions that this one
    needs have ended. F of a microbatch needs the same F of rank r - 1. B of a microbatch needs the
    rank's own F of this microbatch, and the same B of rank r + 1. The first rank has no rank r - 1,
    the last has no rank r + 1.

    Raises
    ------
    ValueError
        If the ranks get stuck: some rank has not finished, and no rank can begin its next action.
        The ranks may wait for each other in a cycle, or for an action that is in no row.
    """
    raise NotImplementedError("task 2 is not started")


def gpipe(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 3: return the actions of `rank` under GPipe: all forwards, in order, then all
    backwards, in order.
    """
    raise NotImplementedError("task 3 is not started")


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the actions of `rank` under 1F1B: after a warm-up, one forward and one
    backward in turn.

    Every microbatch has one forward and one backward; the forwards are in order, and so are the
    backwards. The step takes as long as with GPipe, whatever forward and backward cost. But rank r
    never holds more than `ranks - r` microbatches: those whose forward it has done and whose
    backward it has not. `microbatches` may be smaller than `ranks`.
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
    """Task 5: run this rank's actions, such that every parameter of `stage` has its gradient in
    `.grad`; return the loss.

    Parameters
    ----------
    words : sequence of str
        This rank's actions, from any schedule that can run; each rank may have another order of the
        microbatches. Do them in the given order: one call of `stage` for each F, one backward
        for each B.
    stage : nn.Module
        This rank's part of the model. Its input and its output have the shape and dtype of
        `inputs[m]`.
    loss : callable
        `loss(output, target)` returns a scalar; only the last rank calls it. The gradients must be
        those of the mean of the losses of all microbatches.
    inputs, targets : sequences of Tensor
        One for each microbatch. Only the first rank's inputs and the last rank's targets hold data.
        All others hold NaN: use only their shape and dtype.
    comm : Communicator
        Rank r has stage r. There may be only one rank.

    Returns
    -------
    float
        The mean of the losses on the last rank, 0.0 on the others.

    Messages
    --------
    For every microbatch, send one message to rank + 1 (the output) and one to rank - 1 (the
    gradient of the input), and nothing else. `comm.send(tensor, to, tag)` waits until the other
    rank receives, so it may never return if the other rank waits for you. `request =
    comm.isend(tensor, to, tag)` does not wait; do not change the tensor until `request.wait()` has
    returned. `comm.recv(tensor, source, tag)` fills a tensor of the right shape. Use `tag=m`, and
    no two messages are confused: outputs and gradients go in opposite directions. Do not wait for
    one send before you begin the next: the other rank may receive them in another order. Wait for
    every request before you return.

    Memory
    ------
    When B of a microbatch is done, its input and output must be free: you keep neither of them in a
    list, and autograd keeps nothing of them. (By then the output has been received, because its
    gradient has come back: `wait` returns at once.) You may keep gradients that you are sending
    until the end. (Every `.grad` is None at the call.)

    You need `tensor.detach()`, `tensor.requires_grad_()` and `output.backward(gradient)`. After
    this backward, the gradient of an input that requires one is in `input.grad`.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        return f"6 layers in 3 stages: {cut_layers([4, 1, 1, 1, 1, 4], 3)}"

    def task_2() -> str:
        return (
            f"two ranks, one microbatch: {step_length([['F0', 'B0'], ['F0', 'B0']], 1, 2)}, "
            "expected 6"
        )

    def task_3() -> str:
        return f"rank 0 of {comm.size}, 4 microbatches: {' '.join(gpipe(0, comm.size, 4))}"

    def task_4() -> str:
        return (
            f"rank 0 of {comm.size}, 4 microbatches: "
            f"{' '.join(one_forward_one_backward(0, comm.size, 4))}"
        )

    def task_5() -> str:
        # one microbatch after the other: it needs no task 4
        words = [f"{kind}{m}" for m in range(3) for kind in "FB"]
        stage = nn.Linear(2, 2, dtype=torch.float64)
        nn.init.eye_(stage.weight)
        nn.init.ones_(stage.bias)  # each stage adds 1
        inputs, targets = [
            [torch.full((1, 2), value, dtype=torch.float64)] * 3 for value in (0.0, comm.size + 2.0)
        ]
        run_step(words, stage, nn.functional.mse_loss, inputs, targets, comm)
        return (
            "the gradient of rank 0's bias: "
            f"{None if stage.bias.grad is None else stage.bias.grad.tolist()}"
        ) + (", expected [-2.0, -2.0]")

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
