"""Lesson 12 at full scale: PyTorch's MixedPrecisionPolicy and minidist's MixedPrecision, in
bfloat16 over float32.

    torchrun --nproc-per-node 4 lessons/12_mixed_precision/cluster.py              torch.distributed.fsdp
    torchrun --nproc-per-node 4 lessons/12_mixed_precision/cluster.py --minidist   minidist.full.FSDP, same wires

Shards and AdamW's state are float32: the shards are the master weights. Parameters are gathered,
and everything is computed, in bfloat16; gradients are summed over the ranks in float32. On CUDA,
fp16 with torch.amp.GradScaler works in the same way; bfloat16 needs no loss scale.

Four float32 numbers that are summed in another order may give another last bit, and rounding to
bfloat16 can turn that into 1/256. So the losses agree only to `TOLERANCE`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import FSDP, MixedPrecision

BLOCKS, WIDTH, ROWS, STEPS, RATE = 3, 16, 8, 4, 0.01
TOLERANCE = 2e-3  # relative


def build(device: torch.device) -> nn.Sequential:
    """Return linear layers with tanh between, in float32, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    )
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5
    return model.to(device)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, device: torch.device
) -> list[float]:
    """Train on this rank's rows; return the mean loss of each step over all ranks."""
    generator = torch.Generator().manual_seed(1 + comm.rank)
    inputs = torch.randn(ROWS, WIDTH, generator=generator).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()  # of float32 outputs
        loss.backward()
        optimizer.step()
        mean = loss.detach().double() / comm.size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Shard with PyTorch; the policy says what is bfloat16."""
    model, inside = build(device), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model:
        fully_shard(block, mp_policy=inside)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), comm, device)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Shard with minidist; three dtypes, of parameters, of reduction and of the output."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
    model = FSDP(build(device), comm, op="mean", precision=precision)
    return train(model, model.optimizer(torch.optim.AdamW, lr=RATE), comm, device)


if __name__ == "__main__":
    run_twin(production, ours)
