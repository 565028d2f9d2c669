"""Lesson 04 at full scale: torch's DistributedDataParallel and minidist's DDP train the same model.

    torchrun --nproc-per-node 4 lessons/04_data_parallel/cluster.py              torch.nn.parallel
    torchrun --nproc-per-node 4 lessons/04_data_parallel/cluster.py --minidist   minidist.full, on the same wires

A batch has 11 rows, which neither 2 nor 4 ranks share equally, and two microbatches. The first
microbatch only adds to the gradients; both DDPs launch buckets during the backward of the second.
minidist sums gradients over the ranks. torch averages them, so where the loss is divided by the
rows of all ranks, it has to be multiplied by the number of ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.ddp.sampler import share

ROWS, MICROBATCHES, STEPS = 11, 2, 4


def build(seed: int, device: torch.device) -> nn.Module:
    """Return a model. Each rank has another seed; both strategies make the ranks equal."""
    draws = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draws)
    return model.to(device)


def train(model: Any, comm: Communicator, device: torch.device, factor: int) -> list[float]:
    """Train on gradients of `factor` times the loss; return the loss of each step."""
    draws = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.randn(ROWS, width, dtype=torch.float64, generator=draws).to(device)
        for width in (6, 2)
    )
    mine = share(ROWS, comm.size, comm.rank)
    parts = [tensor[mine].tensor_split(MICROBATCHES) for tensor in (inputs, targets)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for number, (some, wanted) in enumerate(zip(*parts, strict=True), start=1):
            with nullcontext() if number == MICROBATCHES else model.no_sync():
                loss = (model(some) - wanted).square().sum() / ROWS
                (factor * loss).backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch's DDP, which divides gradients by the number of ranks."""
    places = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(
        build(comm.rank, device), device_ids=places, bucket_cap_mb=0.005
    )
    return train(model, comm, device, factor=comm.size)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with minidist's DDP, which is told to sum them."""
    model = DDP(
        build(comm.rank, device), comm, op="sum", bucket_bytes=5000, first_bucket_bytes=1000
    )
    return train(model, comm, device, factor=1)


if __name__ == "__main__":
    run_twin(production, ours)
