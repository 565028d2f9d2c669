"""Lesson 09 at full scale: 1F1B by torch.distributed.pipelining, and by minidist's plan and
executor.

    torchrun --nproc-per-node 4 lessons/09_pipeline/cluster.py              torch's Schedule1F1B
    torchrun --nproc-per-node 4 lessons/09_pipeline/cluster.py --minidist   the plan of this lesson, on the same wires

A regression in float64: eight layers, two on each of four ranks, and eight microbatches. Only the
last rank has a loss, which it broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import broadcast
from minidist.full.pipeline import plan, with_communication
from minidist.full.pipeline.executor import Pipeline
from minidist.full.pipeline.stage import balance, take_stages

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS, RATE = 8, 32, 64, 8, 4, 0.5


class Model(nn.Module):
    """The serial model: layers in a list, of which a stage keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)
        )
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / LAYERS
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a microbatch's part of the mean over the batch."""
    return ((output - target) ** 2).sum() / (ROWS * WIDTH)


def train(
    comm: Communicator,
    stage: nn.Module,
    device: torch.device,
    step: Callable[[Tensor, Tensor], Tensor],
) -> list[float]:
    """Train with `step(inputs, targets)`, which returns the loss on the last rank; return the
    losses on every rank.
    """
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    data = torch.randn(
        2, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        # zero on ranks without a loss, of any dtype
        loss = step(data[0], data[1]).double().reshape(1)
        optimizer.step()
        broadcast(loss, comm, root=comm.size - 1)
        losses.append(loss.item())
    return losses


def stage_of(comm: Communicator, device: torch.device) -> nn.Module:
    """Return this rank's stage."""
    return take_stages(Model(), balance([1.0] * LAYERS, comm.size), [comm.rank])[comm.rank].to(
        device
    )


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch's stage and schedule."""
    module = stage_of(comm, device)
    stage = PipelineStage(module, comm.rank, comm.size, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = comm.rank == comm.size - 1
        schedule.step(
            *([inputs] if comm.rank == 0 else []), target=targets if last else None, losses=losses
        )
        return torch.stack(losses).sum().detach() if last else inputs.new_zeros(())

    return train(comm, module, device, step)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with the plan of this lesson, and what carries it out."""
    module = stage_of(comm, device)
    schedule = with_communication(plan("1f1b", comm.size, MICROBATCHES))
    pipeline = Pipeline({comm.rank: module}, comm, schedule, loss_of, torch.empty_like)
    return train(
        comm,
        module,
        device,
        lambda x, t: pipeline.step(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES)),
    )


if __name__ == "__main__":
    run_twin(production, ours)
