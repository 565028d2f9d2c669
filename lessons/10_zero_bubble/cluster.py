"""Lesson 10 at full scale: interleaved 1F1B, then a zero-bubble schedule, in torch's classes and in
minidist's.

    torchrun --nproc-per-node 4 lessons/10_zero_bubble/cluster.py              torch.distributed.pipelining
    torchrun --nproc-per-node 4 lessons/10_zero_bubble/cluster.py --minidist   the plans of this lesson, same wires

A regression in float64: eight layers, two stages on each rank, and eight microbatches. The first
steps interleave the stages. The other steps lay them out in a V, and put off the gradients of
weights (ZB-V). Only one rank has a loss: the last one, or in a V the first. It tells the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_reduce
from minidist.full.pipeline import plan, with_communication
from minidist.full.pipeline.executor import Pipeline
from minidist.full.pipeline.stage import balance

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS, RATE = 8, 32, 64, 8, 2, 0.5
SCHEDULES = (("interleaved", ScheduleInterleaved1F1B), ("zb-v", ScheduleZBVZeroBubble))

Stages = dict[int, nn.Module]
Step = Callable[[Tensor, Tensor], Tensor]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a microbatch's part of the mean over the batch."""
    return ((output - target) ** 2).sum() / (ROWS * WIDTH)


def train(
    comm: Communicator, device: torch.device, name: str, step_of: Callable[[Stages], Step]
) -> list[float]:
    """Train the model anew with a schedule; return the losses, on every rank."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)
    parts = balance([1.0] * LAYERS, 2 * comm.size)
    mine = plan(name, comm.size, MICROBATCHES, 2).stages_of(comm.rank)
    stages: Stages = {
        s: nn.Sequential(*(nn.Sequential(layers[k], nn.Tanh()) for k in parts[s])).to(device)
        for s in mine
    }
    data = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator).to(device)
    step, losses = step_of(stages), []
    optimizer = torch.optim.SGD(
        [p for stage in stages.values() for p in stage.parameters()], lr=RATE
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(data[0], data[1]).double().reshape(1)  # zero on ranks without the last stage
        optimizer.step()
        all_reduce(loss, comm)
        losses.append(loss.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch's stages and schedules."""

    def step_of(stages: Stages, kind: type) -> Step:
        parts = [PipelineStage(module, s, 2 * comm.size, device) for s, module in stages.items()]
        schedule = kind(parts, MICROBATCHES, loss_fn=loss_of, scale_grads=False)

        def step(x: Tensor, target: Tensor) -> Tensor:
            losses: list[Tensor] = []
            last = 2 * comm.size - 1 in stages
            schedule.step(
                *([x] if 0 in stages else []), target=target if last else None, losses=losses
            )
            return torch.stack(losses).sum().detach() if last else x.new_zeros(())

        return step

    return [
        loss
        for name, kind in SCHEDULES
        for loss in train(comm, device, name, lambda s, kind=kind: step_of(s, kind))
    ]


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with the plans of this lesson."""

    def step_of(stages: Stages, name: str) -> Step:
        schedule = with_communication(plan(name, comm.size, MICROBATCHES, 2))
        pipeline = Pipeline(stages, comm, schedule, loss_of, torch.empty_like)
        return lambda x, target: pipeline.step(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES))

    return [
        loss
        for name, _ in SCHEDULES
        for loss in train(comm, device, name, lambda s, name=name: step_of(s, name))
    ]


if __name__ == "__main__":
    run_twin(production, ours)
