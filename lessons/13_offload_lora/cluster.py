"""Lesson 13 at full scale: adapters inside DDP, by torch's parametrizations and by `add_lora`.

    torchrun --nproc-per-node 4 lessons/13_offload_lora/cluster.py              torch: parametrize, DDP, AdamW
    torchrun --nproc-per-node 4 lessons/13_offload_lora/cluster.py --minidist   add_lora, DDP, its state on the CPU

Torch has no LoRA layer of its own; libraries such as PEFT bring one. But a parametrization computes
a weight from others: here W + α/r BA, in each forward. Either DDP reduces only the gradients of
what is not frozen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.adapters import add_lora
from minidist.full.memory.offload import OffloadedOptimizer

WIDTH, RANK, ALPHA, ROWS, STEPS, RATE = 16, 2, 4.0, 8, 5, 0.02


class LowRank(nn.Module):
    """W + α/r BA, of a frozen W."""

    def __init__(self, A: Tensor, outputs: int) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(A), nn.Parameter(A.new_zeros(outputs, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        """Add the product."""
        return weight + ALPHA / RANK * self.B @ self.A


def pretrained(device: torch.device) -> nn.Sequential:
    """Return the model that is to be adapted, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64, device="meta") for _ in range(2)
    ]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1]).to_empty(device=device)
    for weight in model.parameters():
        drawn = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / WIDTH**0.5
        weight.data.copy_(drawn)
    return model


def train(
    comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[float]:
    """Train on this rank's rows; return the mean loss of each step."""
    generator = torch.Generator().manual_seed(comm.rank + 1)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(device)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / comm.size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Adapt by parametrizing the weights."""
    model, generator = pretrained(device).requires_grad_(False), torch.Generator().manual_seed(1)
    for layer in (model[0], model[2]):
        A = (torch.randn(RANK, WIDTH, generator=generator) / WIDTH**0.5).to(device, torch.float64)
        register_parametrization(layer, "weight", LowRank(A, WIDTH))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(comm, DistributedDataParallel(model), torch.optim.AdamW(trained, lr=RATE), device)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Adapt with `add_lora`, and offload AdamW's state."""
    model = pretrained(device)
    add_lora(model, RANK, ALPHA, targets=("*",), generator=torch.Generator().manual_seed(1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(
        comm,
        DDP(model, comm, op="mean"),
        OffloadedOptimizer(trained, torch.optim.AdamW, lr=RATE),
        device,
    )


if __name__ == "__main__":
    run_twin(production, ours)
