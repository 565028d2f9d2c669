"""Lesson 02 at full scale: gradients are averaged by NCCL's or gloo's all-reduce, and by this
lesson's ring.

    torchrun --nproc-per-node 4 lessons/02_ring_all_reduce/cluster.py              torch.distributed.all_reduce
    torchrun --nproc-per-node 4 lessons/02_ring_all_reduce/cluster.py --minidist   the ring, on the same wires

A linear regression in float64: each rank has its own rows, all have the same weights. NCCL chooses
ring or tree by size; NCCL_ALGO=Ring fixes it, NCCL_DEBUG=INFO prints the rings that it found.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_reduce

ROWS, WEIGHTS, STEPS, RATE = 64, 1000, 5, 0.05


def train(
    comm: Communicator, device: torch.device, add_up: Callable[[torch.Tensor], object]
) -> list[float]:
    """Train, with `add_up` replacing a tensor by the sum over all ranks; return the mean loss of
    each step.
    """
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(ROWS, WEIGHTS, dtype=torch.float64, generator=generator).to(device)
    targets = inputs.sum(1) / WEIGHTS**0.5
    weights = torch.zeros(WEIGHTS, dtype=torch.float64, device=device)
    losses = []
    for _ in range(STEPS):
        error = inputs @ weights - targets
        # gradient and loss
        packed = torch.cat([inputs.T @ error, (error**2).sum().view(1)]) / (ROWS * comm.size)
        add_up(packed)
        weights -= RATE * packed[:-1]
        losses.append(packed[-1].item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Average by torch.distributed."""
    return train(comm, device, dist.all_reduce)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Average by reduce-scatter and all-gather around a ring."""
    return train(comm, device, lambda tensor: all_reduce(tensor, comm, algorithm="ring"))


if __name__ == "__main__":
    run_twin(production, ours)
