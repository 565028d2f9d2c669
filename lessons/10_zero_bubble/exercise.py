"""Lesson 10: two ways to a smaller bubble: several stages a rank, and a backward in two halves.

    interleaved    rank 0 of 2 has stages 0 and 2     0F0 0F1 2F0 ... 2B0 ...       4F3: stage 4, forward, microbatch 3
    zero bubble    B = I + W                          I: gradient of the inputs, W: gradient of the weights

Fill in the functions; their docstrings are the contract. To check a schedule of your own you may use `read_plan`,
`check`, `simulate`, `peak_activations` of `minidist.parallel.pipeline` and `draw_text` of `minidist.draw.pipeline`; the
package's own schedules are what you are building: calling them scores nothing.

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
    """Task 1: return the stages that `rank` has, `chunks` of them, in order.

    There are `ranks * chunks` stages. They are dealt out like cards: stage 0 to rank 0, stage 1 to rank 1, and behind
    the last rank the next one goes to rank 0 again.
    """
    raise NotImplementedError("task 1 is not started")


def warm_up(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Task 1: return how many forwards `rank` does before one forward and one backward take turns, forward first.

    Say that every forward and every backward takes one unit of time, and a message none. Each rank does one forward
    after the other, in the order of task 2, until its first backward can begin. The last of these forwards is that of
    the first turn; the others are the warm-up. (A backward can begin on the last rank when the first microbatch has
    been through all stages, and on every other rank when the rank behind it has done it.) A rank that has done all its
    forwards by then has no turns: they all are warm-up.

    `chunks` is at least 2, `microbatches` a multiple of `ranks`.
    """
    raise NotImplementedError("task 1 is not started")


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Task 2: return the words of `rank` under interleaved 1F1B: `stage kind microbatch`, such as `4F3` or `0B2`.

    Parameters
    ----------
    microbatches : int
        A multiple of `ranks`.
    chunks : int
        At least 2.

    Forwards: `ranks` microbatches through the rank's first stage, the same ones through its second, and so on to its
    last; then the next `ranks` microbatches. Backwards: the same, but from the last stage to the first. First come the
    forwards of the warm-up (task 1), then one forward and one backward in turn while there are forwards left, then the
    other backwards.

    The bubble is (p - 1)/(v m + p - 1) of the step, whatever F and B cost. A longer warm-up than that of task 1 would
    hold more microbatches at a time; with a shorter one the step would be longer if messages took a tenth of a forward.
    """
    raise NotImplementedError("task 2 is not started")


def backward_for_inputs(
    weights: Sequence[Tensor], activations: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor, Pairs]:
    """Task 3: the first half of a stage's backward, by hand: what the stage before waits for, and no more.

    Parameters
    ----------
    weights : sequence of Tensor
        Of each layer l, `[out, in]`. The stage computes activations[l + 1] = tanh(activations[l] @ weights[l].T).
    activations : sequence of Tensor
        One more than layers: the input of the first layer, `[rows, in]`, ... to the output of the last.
    gradient : Tensor
        Of the loss, for the output of the last layer.

    Returns
    -------
    (Tensor, list of pairs of Tensor)
        The gradient for the first layer's input; and for each layer, in order, what its weight's gradient is made of:
        the layer's input, and the gradient for what tanh was applied to.

    Work
    ----
    One matrix product for each layer. No gradient of a weight is computed here. Autograd is not to be used. What you
    are given stays as it is: the gradient and the activations may be needed by others.
    """
    raise NotImplementedError("task 3 is not started")


def backward_for_weights(pairs: Pairs) -> list[Tensor]:
    """Task 3: the second half: return the gradient of each layer's weight, `[out, in]`, from the pairs of the first.

    One matrix product for each layer. Autograd is not to be used.
    """
    raise NotImplementedError("task 3 is not started")


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the words of `rank` under a schedule that fills the bubble with W.

    One stage a rank; stage r is rank r's, so words of rank 0 are `0F3`, `0I3` and `0W3`, one of rank 2 is `2F3`.
    `microbatches` is at least `ranks`. Every microbatch once F, I and W, with I before W. Each kind takes the
    microbatches in order, from 0 to the last.

    Time
    ----
    Every rank idles for (p - 1)(F + I - W) at most, if W takes no longer than F and no longer than I.

    Memory
    ------
    At no time does a rank hold more than p microbatches whose F is done and whose W is not: what the first rank of 1F1B
    holds. The order of the F and I is that of 1F1B; what you choose is where each W goes.
    """
    raise NotImplementedError("task 4 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    ranks = comm.size

    def task_1() -> str:
        return (
            f"rank 0 of {ranks}, 2 chunks: stages {stages_of(0, ranks, 2)}, warm-up {warm_up(0, ranks, 2 * ranks, 2)}"
        )

    def task_2() -> str:
        return f"rank 0 of {ranks}, 2 chunks: {' '.join(interleaved(0, ranks, ranks, 2))}"

    def task_3() -> str:
        x, weight = torch.tensor([[1.0, 2.0]]), torch.zeros(2, 2)
        activations = [x, torch.tanh(x @ weight.T)]
        gradient, pairs = backward_for_inputs([weight], activations, torch.tensor([[1.0, 3.0]]))
        return (
            f"{backward_for_weights(pairs)[0].tolist()}, expected [[1.0, 2.0], [3.0, 6.0]]; for x {gradient.tolist()}"
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
