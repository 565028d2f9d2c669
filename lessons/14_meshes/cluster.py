"""Lesson 14 at full scale: tensor parallel inside, data parallel outside, clipped by one norm for
the whole mesh.

    torchrun --nproc-per-node 4 lessons/14_meshes/cluster.py              DeviceMesh, parallelize_module, fully_shard
    torchrun --nproc-per-node 4 lessons/14_meshes/cluster.py --minidist   Mesh, parallelize with ZeRO 3

On 4 ranks the mesh is dp=2 x tp=2; on 2 ranks it is tp=2. Both name the axes, both put tp
innermost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from minidist import Communicator, Layout, Mesh
from minidist.course.twin import run_twin
from minidist.full import ColumnParallel, Recipe, RowParallel, parallelize
from minidist.full.collectives import all_reduce

TP, ROWS, WIDTH, BLOCKS = 2, 16, 12, 3  # rows of the whole batch
STEPS, RATE, LIMIT = 4, 1.0, 0.5


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=torch.float64)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, WIDTH]."""
        return x + self.down(torch.relu(self.up(x)))


def build(device: torch.device) -> nn.Module:
    """Return the serial model, the same on every rank."""
    generator, model = (
        torch.Generator().manual_seed(0),
        nn.Sequential(*(Block() for _ in range(BLOCKS))),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.to(device)


def batch(step: int, dp: int, of: int, device: torch.device) -> Tensor:
    """Return this data rank's rows of a step."""
    rows = torch.randn(
        ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )
    return rows.chunk(of)[dp].to(device)


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch's own mesh."""
    mesh = init_device_mesh(device.type, (comm.size // TP, TP), mesh_dim_names=("dp", "tp"))
    model, losses = build(device), []
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        x = batch(step, mesh["dp"].get_local_rank(), mesh["dp"].size(), device)
        loss = (model(x) - x.flip(1)).square().mean()  # fully_shard averages gradients over dp
        optimizer.zero_grad()
        loss.backward()
        # DTensors know which ranks hold the same
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        losses.append(mean_over(comm, loss))
    return losses


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with minidist's mesh."""
    mesh, dp = Mesh(comm, Layout(dp=comm.size // TP, tp=TP)), comm.size // TP
    plan = {"*.up": ColumnParallel(), "*.down": RowParallel()}
    parallel = parallelize(
        build(device),
        mesh,
        Recipe(zero=3, tensor_plan=plan),
        lambda y, x: (y - x).square().mean() / dp,
    )
    optimizer = parallel.optimizer(
        torch.optim.SGD, [{"params": list(parallel.model.parameters())}], lr=RATE
    )
    losses = []
    for step in range(STEPS):
        x = batch(step, mesh.dp.rank, mesh.dp.size, device)
        parallel.zero_grad()  # gradients are summed over dp
        loss = parallel.step([x], [x.flip(1)])
        parallel.clip(LIMIT)
        optimizer.step()
        losses.append(mean_over(comm, loss * dp))
    return losses


def mean_over(comm: Communicator, loss: Tensor) -> float:
    """Return the mean of all ranks' losses."""
    total = loss.detach().clone()
    all_reduce(total, comm, op="mean")
    return total.item()


if __name__ == "__main__":
    run_twin(production, ours)
