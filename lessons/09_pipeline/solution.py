"""Lesson 09, solved: the package's own pipeline. Read it in `minidist/pipeline.py`, then in
`minidist/full/pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist import pipeline as book
from minidist.full.pipeline import read_plan, simulate, with_communication
from minidist.full.pipeline.executor import Pipeline
from minidist.full.pipeline.stage import balance

Loss = Callable[[Tensor, Tensor], Tensor]


def cut_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Return which layers each stage gets."""
    return balance(costs, stages)


def step_length(rows: Sequence[Sequence[str]], forward: float, backward: float) -> float:
    """Return how long a schedule takes. A ScheduleError is a ValueError."""
    return simulate(read_plan(text_of(rows)), forward, backward).length


def gpipe(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the words of `rank` under GPipe."""
    return words_of(book.gpipe(ranks, microbatches)[rank])


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the words of `rank` under 1F1B."""
    return words_of(book.one_f_one_b(ranks, microbatches)[rank])


def run_step(
    words: Sequence[str],
    stage: nn.Module,
    loss: Loss,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    comm: Communicator,
) -> float:
    """Run this rank's words."""
    schedule = with_communication(read_plan(text_of(comm.all_gather_object(list(words)))))
    pipeline = Pipeline(
        {comm.rank: stage},
        comm,
        schedule,
        lambda output, target: loss(output, target) / len(inputs),
        lambda x: torch.empty_like(x, device="meta"),
    )
    return float(pipeline.step(inputs, targets))


def text_of(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of words such as `F0` as the package does, with the stage in front: `1F0`."""
    return "\n".join(" ".join(f"{rank}{word}" for word in row) for rank, row in enumerate(rows))


def words_of(actions: Sequence[book.Action]) -> list[str]:
    """Return a rank's actions as words."""
    return [f"{kind}{microbatch}" for kind, microbatch in actions]
