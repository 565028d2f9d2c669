"""Lesson 09, an honest answer: schedules and a pipeline by hand, from the handout alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator

Loss = Callable[[Tensor, Tensor], Tensor]
# a request, and the tensor that must stay as it is until the request has been waited for
UnderWay = tuple[Any, Tensor]


def cut_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Task 1: return which layers each stage gets, so that the most expensive stage is as cheap as
    it can be.
    """
    layers = len(costs)
    # by how many layers are in stages already
    best: dict[int, tuple[float, list[range]]] = {0: (-math.inf, [])}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[range]]] = {}
        for stop in range(stage, layers + 1):
            for start in best:
                if start < stop:
                    dearest = max(best[start][0], sum(costs[start:stop]))
                    if stop not in longer or dearest < longer[stop][0]:
                        longer[stop] = dearest, [*best[start][1], range(start, stop)]
        best = longer
    return best[layers][1]


def step_length(rows: Sequence[Sequence[str]], forward: float, backward: float) -> float:
    """Task 2: return how long a schedule takes, from 0 until the last rank is done."""
    ended: dict[tuple[int, str], float] = {}  # when (rank, word) was done
    done, clocks = [0] * len(rows), [0.0] * len(rows)

    def needed(rank: int, word: str) -> list[tuple[int, str]]:
        if word[0] == "F":
            return [(rank - 1, word)] if rank > 0 else []
        return [(rank, "F" + word[1:])] + ([(rank + 1, word)] if rank < len(rows) - 1 else [])

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while done[rank] < len(row) and all(
                need in ended for need in needed(rank, row[done[rank]])
            ):
                word = row[done[rank]]
                begin = max([clocks[rank], *(ended[need] for need in needed(rank, word))])
                clocks[rank] = ended[rank, word] = begin + (forward if word[0] == "F" else backward)
                done[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {row[at]}"
        for rank, (row, at) in enumerate(zip(rows, done, strict=True))
        if at < len(row)
    ]
    if stuck:
        raise ValueError("the ranks are stuck: " + ", ".join(stuck))
    return max(clocks, default=0.0)


def gpipe(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 3: return the words of `rank` under GPipe: all forwards, in order, then all backwards,
    in order.
    """
    return [f"{kind}{m}" for kind in "FB" for m in range(microbatches)]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Task 4: return the words of `rank` under 1F1B: after a warm-up, one forward and one backward
    in turn.
    """
    ahead = min(ranks - rank - 1, microbatches)
    words = [f"F{m}" for m in range(ahead)]
    for m in range(microbatches):
        if m + ahead < microbatches:
            words.append(f"F{m + ahead}")
        words.append(f"B{m}")
    return words


def run_step(
    words: Sequence[str],
    stage: nn.Module,
    loss: Loss,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    comm: Communicator,
) -> float:
    """Task 5: carry out this rank's words; afterwards, every parameter of `stage` has its gradient
    in `.grad`.
    """
    rank, microbatches = comm.rank, len(inputs)
    is_first, is_last = rank == 0, rank == comm.size - 1
    # input and output (on the last rank, loss) between F and B
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: dict[int, UnderWay] = {}  # on their way to the next rank
    gradients: list[UnderWay] = []  # on their way to the rank before
    losses = []

    def received(m: int, source: int) -> Tensor:
        message = torch.empty(inputs[m].shape, dtype=inputs[m].dtype)
        comm.recv(message, source, m)
        return message

    def do_forward(m: int) -> None:
        x = inputs[m].detach() if is_first else received(m, rank - 1).requires_grad_()
        output = stage(x)
        if is_last:
            output = loss(output, targets[m]) / microbatches
            losses.append(output.item())
        else:
            message = output.detach().contiguous()
            outputs[m] = comm.isend(message, rank + 1, m), message
        kept[m] = x, output

    def do_backward(m: int) -> None:
        x, output = kept.pop(m)
        if is_last:
            output.backward()
        else:
            output.backward(received(m, rank + 1))
            outputs.pop(m)[0].wait()  # its gradient is here, so it has arrived
        if not is_first:
            assert x.grad is not None
            message = x.grad.contiguous()
            gradients.append((comm.isend(message, rank - 1, m), message))

    for word in words:
        (do_forward if word[0] == "F" else do_backward)(int(word[1:]))
    for request, _ in gradients:
        request.wait()
    return sum(losses)


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
