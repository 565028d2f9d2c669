"""Lesson 10, an honest answer: interleaved and zero-bubble schedules by hand, from the handout
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import minidist

Pairs = list[tuple[Tensor, Tensor]]


def stages_of(rank: int, ranks: int, chunks: int) -> list[int]:
    """Task 1: return the stages that `rank` has, `chunks` of them, in order."""
    return list(range(rank, ranks * chunks, ranks))


def warm_up(rank: int, ranks: int, microbatches: int, chunks: int) -> int:
    """Task 1: return how many forwards `rank` does before one forward and one backward take
    turns.
    """
    return min((chunks - 1) * ranks + 2 * (ranks - rank - 1), chunks * microbatches)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Task 2: return the words of `rank` under interleaved 1F1B: `stage kind microbatch`, such as
    `4F3` or `0B2`.
    """
    stages = stages_of(rank, ranks, chunks)
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forwards = [f"{stage}F{m}" for group in groups for stage in stages for m in group]
    backwards = [f"{stage}B{m}" for group in groups for stage in reversed(stages) for m in group]
    first = warm_up(rank, ranks, microbatches, chunks)
    turns = [word for pair in zip(forwards[first:], backwards, strict=False) for word in pair]
    return forwards[:first] + turns + backwards[len(forwards) - first :]


def backward_for_inputs(
    weights: Sequence[Tensor], activations: Sequence[Tensor], gradient: Tensor
) -> tuple[Tensor, Pairs]:
    """Task 3: the first half of a stage's backward, by hand: what the stage before waits for, and
    no more.
    """
    pairs: Pairs = []
    with torch.no_grad():
        for layer in reversed(range(len(weights))):
            before_tanh = gradient * (1 - activations[layer + 1] ** 2)
            pairs.append((activations[layer], before_tanh))
            gradient = before_tanh @ weights[layer]
    return gradient, pairs[::-1]


def backward_for_weights(pairs: Pairs) -> list[Tensor]:
    """Task 3: the second half: return the gradient of each layer's weight, `[out, in]`."""
    with torch.no_grad():
        return [gradient.T @ x for x, gradient in pairs]


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the words of `rank` under a schedule that fills the bubble with W: `0F3`,
    `0I3`, `0W3`.
    """
    ahead = ranks - rank - 1
    words = [f"{rank}F{m}" for m in range(ahead)]
    for m in range(microbatches):
        if m + ahead < microbatches:
            words.append(f"{rank}F{m + ahead}")
        words.append(f"{rank}I{m}")
        if m >= rank:  # from here on, rank weight gradients are owed: they fill the wait at the end
            words.append(f"{rank}W{m - rank}")
    return words + [f"{rank}W{m}" for m in range(microbatches - rank, microbatches)]


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
