"""Lesson 10: two ways to a smaller bubble: several stages on each rank, and a backward in two
halves.

    interleaved    rank 0 of 2 has stages 0 and 2     0F0 0F1 2F0 ... 2B0 ...       4F3: stage 4, forward, microbatch 3
    zero bubble    B = I + W                          I: gradient of the inputs, W: gradient of the weights

Fill in the functions; their docstrings are the contract. To check a schedule of your own you may
use `read_plan`, `check`, `simulate`, `peak_activations` of `minidist.full.pipeline` and
`draw_text` of `minidist.draw.pipeline`; you are building the package's own schedules, so calling
them scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 10             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import minidist

Pairs = list[tuple[Tensor, Tensor]]


def stages_of(rank: int, ranks: int, chunks: int) -> list[int]:
    """Task 1, first half: return the list of the `chunks` stages that `rank` has, in ascending
    order.

    There are `ranks * chunks` stages. The ranks get them in turn: stage 0 goes to rank 0, stage 1
    to rank 1, and so on; after the last rank, the next stage goes to rank 0 again.
    """
    raise NotImplementedError("task 1 is not started")


def warm_up(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Task 1, second half: return the number of forwards that `rank` does in its warm-up.

    After the warm-up, a rank does one forward and one backward in turn, the forward first. Assume
    that every forward and every backward takes one unit of time, and messages take none. Each rank
    does one forward after the other, in the order of task 2, until its first backward can begin.
    The last of these forwards belongs to the first turn; the others are the warm-up. A rank that
    has no forward left before then, and has to wait, has no turns: all its forwards are warm-up.

    When can the first backward of a rank begin? On the last rank, when the first microbatch has
    passed through all stages. On every other rank, when the next rank has done its first backward.

    `chunks` is at least 2, `microbatches` a multiple of `ranks`.
    """
    raise NotImplementedError("task 1 is not started")


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Task 2: return the actions of `rank` under interleaved 1F1B: `stage kind microbatch`, such
    as `4F3` or `0B2`.

    Parameters
    ----------
    microbatches : int
        A multiple of `ranks`.
    chunks : int
        At least 2.

    The order of the forwards: `ranks` microbatches through the rank's first stage, the same
    microbatches through its second stage, and so on to its last; then the next `ranks`
    microbatches. The order of the backwards: the same, but from the last stage to the first. The
    schedule begins with the forwards of the warm-up (task 1). Then one forward and one backward
    follow in turn while there are forwards left. Then the other backwards follow.

    The bubble is (p - 1)/(v m + p - 1) of the step, whatever F and B cost. A longer warm-up than
    that of task 1 would hold more microbatches. With a shorter warm-up, the step would take longer
    if a message took a tenth of a forward.
    """
    raise NotImplementedError("task 2 is not started")


def backward_for_inputs(
    weights: Sequence[Tensor], activations: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor, Pairs]:
    """Task 3, I: compute the first half of a stage's backward by hand: only the gradient that the
    stage before waits for.

    Parameters
    ----------
    weights : sequence of Tensor
        The weight of each layer l, `[out, in]`. The stage has computed
        activations[l + 1] = tanh(activations[l] @ weights[l].T).
    activations : sequence of Tensor
        One more than there are layers: from the input of the first layer, `[rows, in]`, to the
        output of the last.
    gradient : Tensor
        The gradient of the loss with respect to the output of the last layer.

    Returns
    -------
    (Tensor, list of pairs of Tensor)
        The gradient with respect to the input of the first layer. And for each layer, in order, the
        two factors of its weight gradient: (the layer's input, the gradient with respect to the
        argument of tanh).

    Work
    ----
    One matrix product for each layer. Compute no weight gradient here. Do not use autograd. Do not
    change the arguments: others may need the gradient and the activations.
    """
    raise NotImplementedError("task 3 is not started")


def backward_for_weights(pairs: Pairs) -> list[Tensor]:
    """Task 3, W: the second half: return the list of the weight gradients, `[out, in]`, from the
    pairs of the first half.

    One matrix product for each layer. Do not use autograd.
    """
    raise NotImplementedError("task 3 is not started")


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the actions of `rank` under ZB-H1, a schedule that fills the bubble with W.

    Rank r has stage r, and no other. So actions of rank 0 are `0F3`, `0I3` and `0W3`, and one of
    rank 2 is `2F3`. `microbatches` is at least `ranks`. Every microbatch has one F, one I and one
    W, with I before W. The actions of each kind take the microbatches in order, from 0 to the last.
    F and I have the same order as F and B in 1F1B. You choose where each W goes.

    Time
    ----
    Every rank idles for at most (p - 1)(F + I - W), if W takes no longer than F and no longer than
    I.

    Memory
    ------
    A rank never holds more than p microbatches: those whose F is done and whose W is not. The first
    rank of 1F1B holds as many.
    """
    raise NotImplementedError("task 4 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    ranks = comm.size

    def task_1() -> str:
        return (
            f"rank 0 of {ranks}, 2 chunks: stages {stages_of(0, ranks, 2)}, warm-up "
            f"{warm_up(0, ranks, 2 * ranks, 2)}"
        )

    def task_2() -> str:
        return f"rank 0 of {ranks}, 2 chunks: {' '.join(interleaved(0, ranks, ranks, 2))}"

    def task_3() -> str:
        x, weight = torch.tensor([[1.0, 2.0]]), torch.zeros(2, 2)
        activations = [x, torch.tanh(x @ weight.T)]
        gradient, pairs = backward_for_inputs([weight], activations, torch.tensor([[1.0, 3.0]]))
        return (
            f"{backward_for_weights(pairs)[0].tolist()}, expected [[1.0, 2.0], [3.0, 6.0]]; "
            f"for x {gradient.tolist()}"
        )

    def task_4() -> str:
        return f"rank 0 of {ranks}: {' '.join(zb_h1(0, ranks, ranks))}"

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
