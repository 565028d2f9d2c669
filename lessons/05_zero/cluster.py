"""Lesson 05 at full scale: torch's ZeroRedundancyOptimizer around AdamW, and minidist's ZeRO-2.

    torchrun --nproc-per-node 4 lessons/05_zero/cluster.py              torch.distributed.optim
    torchrun --nproc-per-node 4 lessons/05_zero/cluster.py --minidist   minidist.full, on the same wires

torch gives each rank some whole parameters to update. Under DDP it all-reduces the gradients, and
each rank updates its parameters and broadcasts them. Every rank has the whole gradient, and clips
it without a message. minidist cuts each bucket into slices and frees a bucket that is reduced; to
clip, it sums the squares of all slices over the ranks. The losses are the same. (torch's
`fully_shard(model, reshard_after_forward=False)` is ZeRO-2 as well: lesson 06.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import ZeRO2, clip_by_global_norm

ROWS, STEPS, LIMIT, RATE = 8, 4, 1.0, 0.01  # rows of each rank


def build(device: torch.device) -> nn.Module:
    """Return a model, the same on every rank."""
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draws)
    return model.to(device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object],
    comm: Communicator,
    device: torch.device,
    divisor: int,
) -> list[float]:
    """Train on gradients of the sum over rows, divided by `divisor`; return the mean loss of each
    step.
    """
    draws = torch.Generator().manual_seed(comm.rank)
    inputs, targets = (
        torch.randn(ROWS, width, dtype=torch.float64, generator=draws).to(device)
        for width in (6, 2)
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss: Tensor = (model(inputs) - targets).square().sum()
        (loss / divisor).backward()
        clip()
        optimizer.step()
        mean = loss.detach() / (ROWS * comm.size)
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with whole gradients, averaged over the ranks; each rank has the optimizer of some
    parameters.
    """
    places = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(build(device), device_ids=places)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE
    )
    clip = nn.utils.clip_grad_norm_
    return train(
        model, optimizer, lambda: clip(model.parameters(), LIMIT), comm, device, divisor=ROWS
    )


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with slices of the summed gradients, and an optimizer over slices."""
    model = ZeRO2(build(device), comm, op="sum", bucket_bytes=4000, first_bucket_bytes=1000)
    optimizer = model.optimizer(torch.optim.AdamW, lr=RATE)
    clip = clip_by_global_norm
    return train(
        model, optimizer, lambda: clip(model.slices, LIMIT), comm, device, divisor=ROWS * comm.size
    )


if __name__ == "__main__":
    run_twin(production, ours)
