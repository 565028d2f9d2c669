"""Lesson 18 at full scale: attention over tokens that are split over ranks, in zigzag order.

    torchrun --nproc-per-node 4 lessons/18_context_parallel/cluster.py              torch's context_parallel
    torchrun --nproc-per-node 4 lessons/18_context_parallel/cluster.py --minidist   this lesson's ring

Each rank keeps T/P tokens of the same sequences. On GPUs `context_parallel` puts a ring in the
place of `scaled_dot_product_attention`. It has none for a CPU's kernel, so there the same ring is
called by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_reduce
from minidist.full.context import parallelize_context
from minidist.full.context.order import positions

# torch's ring merges in float32
HIDDEN, HEADS, TIME, STEPS, RATE, TOLERANCE = 32, 4, 48, 5, 0.5, 1e-5
CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Model(nn.Module):
    """x + output(attend(query, key, value)), where x = inputs + wave(positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.attend = lambda q, k, v: nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    def forward(self, inputs: Tensor, places: Tensor) -> Tensor:
        x = inputs + torch.outer(places, torch.arange(HIDDEN, device=places.device) / HIDDEN).sin()
        query, key, value = (
            matrix(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for matrix in self.maps[:3]
        )
        return x + self.maps[3](self.attend(query, key, value).transpose(1, 2).flatten(2))


class RingOfTorch(torch.autograd.Function):
    """What `context_parallel` does on GPUs, with a CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        output, lse = of_torch._templated_ring_attention(
            torch.distributed.group.WORLD, 2, CPU, *qkv, is_causal=True
        )
        ctx.save_for_backward(*qkv, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        told = torch.distributed.group.WORLD, 2, BACKWARD, gradient, "grad_out", *ctx.saved_tensors
        return of_torch._templated_ring_attention_backward(*told, is_causal=True, dropout_p=0.0)[:3]


def train(
    comm: Communicator, model: Model, mine: Tensor, within: Callable[[list[Tensor]], Any]
) -> list[float]:
    """Train on the tokens `mine` of each sequence, in the context `within(batch)`, which may cut
    the batch again.
    """
    generator, losses = torch.Generator().manual_seed(0), []
    data = torch.randn(2, 4, TIME, HIDDEN, generator=generator).to(mine.device)[:, :, mine]
    for parameter in model.parameters():
        parameter.data = (
            torch.empty(parameter.shape).normal_(0, 0.2, generator=generator).to(mine.device)
        )
    for _ in range(STEPS):
        model.zero_grad()
        # cut in place
        inputs, targets, places = batch = [data[0].clone(), data[1].clone(), mine.float()]
        with within(batch):
            loss = (model(inputs, places) - targets).square().sum() / (4 * TIME * HIDDEN)
            loss.backward()
        for share in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
            all_reduce(share, comm)  # that of all tokens is the sum over ranks
        for parameter in model.parameters():
            parameter.data -= RATE * parameter.grad
        losses.append(loss.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train in torch's `context_parallel`, which cuts the batch."""
    model, mesh = Model(), init_device_mesh(device.type, (comm.size,))
    if device.type == "cpu":
        model.attend = RingOfTorch.apply
    mine = torch.arange(TIME, device=device)  # all, to be cut
    return train(
        comm,
        model,
        mine,
        lambda batch: context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 0]),
    )


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with this lesson's ring, in the same order of tokens."""
    model = Model()
    parallelize_context(model, comm, "ring", "zigzag")
    return train(
        comm, model, positions("zigzag", comm.size, comm.rank, TIME).to(device), nullcontext
    )


if __name__ == "__main__":
    run_twin(production, ours)
