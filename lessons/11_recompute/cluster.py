"""Lesson 11 at full scale: blocks that are recomputed inside DDP, by torch's checkpoint and by
ours.

    torchrun --nproc-per-node 4 lessons/11_recompute/cluster.py              torch.utils.checkpoint, torch's DDP
    torchrun --nproc-per-node 4 lessons/11_recompute/cluster.py --minidist   minidist's recompute and DDP, same wires

A residual network in float64; each rank has its own rows. Both run the forward of each segment
twice in a step. Both keep the graph of the plain forward (`use_reentrant=False`), so DDP's hooks
see each gradient once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.collectives import all_reduce
from minidist.full.recompute import recompute

WIDTH, LAYERS, SEGMENT, ROWS, STEPS, RATE = 16, 6, 2, 8, 4, 0.05


class Block(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(
            torch.randn(4 * WIDTH, WIDTH, dtype=torch.float64, generator=generator) / WIDTH**0.5
        )
        self.down = nn.Parameter(
            torch.randn(WIDTH, 4 * WIDTH, dtype=torch.float64, generator=generator) / WIDTH
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, D]."""
        return x + nn.functional.gelu(x @ self.up.T) @ self.down.T


class Network(nn.Module):
    """Blocks one after the other, in a loop that `recompute` finds; or by torch, in segments."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Block(generator) for _ in range(LAYERS))
        self.by_torch = by_torch

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, D]."""
        if self.by_torch:
            return checkpoint_sequential(self.layers, LAYERS // SEGMENT, x, use_reentrant=False)
        for layer in self.layers:
            x = layer(x)
        return x


def train(
    comm: Communicator,
    model: nn.Module,
    wrap: Callable[[nn.Module], nn.Module],
    device: torch.device,
) -> list[float]:
    """Train on this rank's rows; return the mean loss of each step."""
    generator = torch.Generator().manual_seed(comm.rank + 1)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(device)
    wrapped = wrap(model.to(device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        wrapped.zero_grad()
        loss = (wrapped(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone().view(1) / comm.size
        all_reduce(mean, comm)
        losses.append(mean.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Recompute with torch.utils.checkpoint."""
    return train(comm, Network(by_torch=True), DistributedDataParallel, device)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Recompute with `minidist.full.recompute.segments`."""
    model = Network(by_torch=False)
    recompute(model, f"every {SEGMENT}")
    return train(comm, model, lambda module: DDP(module, comm, op="mean"), device)


if __name__ == "__main__":
    run_twin(production, ours)
