"""Lesson 06 at full scale: PyTorch's fully_shard, and minidist's FSDP, train the same blocks to the
same losses.

    torchrun --nproc-per-node 4 lessons/06_fsdp/cluster.py              torch.distributed.fsdp.fully_shard
    torchrun --nproc-per-node 4 lessons/06_fsdp/cluster.py --minidist   minidist.full.FSDP, on the same wires

A regression in float64. Each rank has its own rows and, once the model is wrapped, a part of every
block. Both average gradients over the ranks. AdamW updates shards, so its state is sharded as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import FSDP

BLOCKS, WIDTH, ROWS, STEPS, RATE = 3, 16, 8, 4, 0.01


class Block(nn.Module):
    """x + down(tanh(up(x))): what is gathered together, and freed together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, D] of [B, D]."""
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def build(device: torch.device) -> nn.Sequential:
    """Return the blocks, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).double()
    for parameter in model.parameters():
        parameter.data = (
            torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / WIDTH
        )
    return model.to(device)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, device: torch.device
) -> list[float]:
    """Train on this rank's rows; return the mean loss of each step over all ranks."""
    generator = torch.Generator().manual_seed(1 + comm.rank)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / comm.size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Shard each block with PyTorch, then the model, which holds no other parameters."""
    model = build(device)
    for module in (*model, model):
        fully_shard(module)
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), comm, device)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Shard each block with minidist; `model.optimizer` builds AdamW over this rank's slices."""
    model = FSDP(build(device), comm, op="mean")
    return train(model, model.optimizer(torch.optim.AdamW, lr=RATE), comm, device)


if __name__ == "__main__":
    run_twin(production, ours)
