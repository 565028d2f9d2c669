"""Lesson 07 at full scale: an MLP between an embedding and a head, its matrices cut over the ranks.

    torchrun --nproc-per-node 4 lessons/07_tensor_parallel/cluster.py              torch's parallelize_module (DTensor)
    torchrun --nproc-per-node 4 lessons/07_tensor_parallel/cluster.py --minidist   this lesson, on the same wires

All ranks are given the same tokens. Torch's plan and ours cut the same matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import ColumnParallel, RowParallel, VocabularyParallel, parallelize_tensor
from minidist.full import vocabulary_parallel_cross_entropy_sum as cross_entropy_sum

VOCABULARY, HIDDEN, STEPS, RATE = 64, 32, 5, 0.5


class Block(nn.Module):
    """An embedding, an MLP with its residual, x + down(gelu(up(x))), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return for each token the logits of the next one."""
        x = self.embedding(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def train(
    device: torch.device, split: Callable[[nn.Module], Callable[[Tensor, Tensor], Tensor]]
) -> list[float]:
    """Train a model. `split` cuts it in place, and returns what runs one backward and returns the
    mean loss.
    """
    generator = torch.Generator().manual_seed(0)
    model = Block().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    tokens = torch.randint(VOCABULARY, (8, 17), generator=generator).to(device)
    backward = split(model.to(device))
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        losses.append(backward(tokens[:, :-1], tokens[:, 1:].flatten()).item())
        for parameter in model.parameters():
            parameter.data -= RATE * parameter.grad
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Cut by torch: parameters become DTensors, of which each rank holds a piece."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    def split(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel()}
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        plan |= {"down": RowwiseParallel(), "head": head}
        parallelize_module(model, init_device_mesh(device.type, (comm.size,)), plan)

        def backward(tokens: Tensor, targets: Tensor) -> Tensor:
            with loss_parallel():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
                loss.backward()
            return loss.detach().full_tensor()

        return backward

    return train(device, split)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Cut by minidist."""

    def split(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        plan = {"embedding": VocabularyParallel(), "up": ColumnParallel(), "down": RowParallel()}
        parallelize_tensor(model, comm, plan | {"head": ColumnParallel()})

        def backward(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = cross_entropy_sum(model(tokens), targets, comm, VOCABULARY) / targets.numel()
            loss.backward()
            return loss.detach()

        return backward

    return train(device, split)


if __name__ == "__main__":
    run_twin(production, ours)
