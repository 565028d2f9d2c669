"""Lesson 08 at full scale: norms and residuals on split tokens, an MLP on split channels.

    torchrun --nproc-per-node 4 lessons/08_sequence_parallel/cluster.py              torch's SequenceParallel (DTensor)
    torchrun --nproc-per-node 4 lessons/08_sequence_parallel/cluster.py --minidist   this lesson, on the same wires

All ranks are given the same sequences. Outside of the MLP each rank keeps 1/P of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import ColumnParallel, RowParallel, parallelize_tensor
from minidist.full.adjoint import gather_from
from minidist.full.tensor.styles import SplitSequence

HIDDEN, TIME, STEPS, RATE = 32, 16, 5, 0.3


class Model(nn.Module):
    """x = enter(inputs); x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Identity()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, T, D]; with split tokens, this rank's part of it."""
        x = self.enter(inputs)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(
    device: torch.device, split: Callable[[nn.Module], Callable[[Tensor], Tensor]]
) -> list[float]:
    """Train a model. `split` cuts it in place, and returns what runs it and returns all tokens on
    every rank.
    """
    generator = torch.Generator().manual_seed(0)
    model = Model().double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    inputs, targets = torch.randn(2, 4, TIME, HIDDEN, dtype=torch.float64, generator=generator).to(
        device
    )
    forward = split(model.to(device))
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = F.mse_loss(forward(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            parameter.data -= RATE * parameter.grad
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Cut by torch. DTensor sums the gradients of the norm, as it knows that they are partial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    def split(model: nn.Module) -> Callable[[Tensor], Tensor]:
        mesh, tokens = init_device_mesh(device.type, (comm.size,)), Shard(1)
        plan = {
            "enter": styles.PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=tokens, use_local_output=False
            ),
            "norm": styles.SequenceParallel(),
            "up": styles.ColwiseParallel(input_layouts=tokens),
            "down": styles.RowwiseParallel(output_layouts=tokens, use_local_output=False),
        }
        styles.parallelize_module(model, mesh, plan)

        def forward(inputs: Tensor) -> Tensor:
            out: DTensor = model(inputs)  # [B, T, D], of which this rank holds [B, T/P, D]
            return out.full_tensor()

        return forward

    return train(device, split)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Cut by minidist. `sum_gradient` sums the gradients of the norm and of the last bias."""

    def split(model: nn.Module) -> Callable[[Tensor], Tensor]:
        styles = {"enter": SplitSequence(), "up": ColumnParallel(), "down": RowParallel()}
        parallelize_tensor(model, comm, styles, sequence=True)
        return lambda inputs: gather_from(model(inputs), comm, 1, TIME)

    return train(device, split)


if __name__ == "__main__":
    run_twin(production, ours)
