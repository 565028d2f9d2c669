"""Lesson 19 at full scale: experts on two ranks of each group, their gradients summed over the
groups.

    torchrun --nproc-per-node 4 lessons/19_experts/cluster.py              all_to_all_single and grouped_mm of torch
    torchrun --nproc-per-node 4 lessons/19_experts/cluster.py --minidist   this lesson, on the same wires

Every rank has its own tokens, and the router. On four ranks there are two copies of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_reduce
from minidist.full.expert import expert_parallel
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPTConfig, Where
from minidist.full.model.moe.routed import MoE

CONFIG = GPTConfig(hidden=32, heads=1, intermediate=16, experts=8, top_k=2, layers=1, sequence=16)
# of each rank; float32, in which torch multiplies groups
TOKENS, STEPS, RATE, TOLERANCE = 64, 5, 0.5, 1e-5


class Dispatcher:
    """A `Compute` of torch's own parts: tokens travel by `all_to_all_single`, one product serves
    all experts.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup) -> None:
        self.experts, self.group, self.ranks = experts, group, group.size()

    def __call__(self, rows: Tensor, counts: list[int]) -> Tensor:
        leaving = torch.tensor(counts, device=rows.device).view(self.ranks, -1)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        # the GPU waits for the CPU here
        sent, came = leaving.sum(1).tolist(), coming.sum(1).tolist()
        rows = all_to_all_single_autograd(rows, came, sent, self.group)
        whose = torch.arange(coming.shape[1], device=rows.device).repeat(self.ranks)
        order = whose.repeat_interleave(coming.flatten()).argsort(stable=True)
        ends = coming.sum(0).cumsum(0).to(torch.int32)
        gate, up, down = (
            partial(F.grouped_mm, mat_b=weight.mT, offs=ends)
            for weight in self.experts.parameters()
        )
        made = down(F.silu(gate(rows[order])) * up(rows[order]))
        return all_to_all_single_autograd(
            torch.empty_like(made).index_copy(0, order, made), sent, came, self.group
        )


def train(
    comm: Communicator, device: torch.device, spread: Callable[[nn.Module, int], Communicator]
) -> list[float]:
    """Train a layer to imitate random numbers; `spread` leaves this rank's experts, and returns who
    has the same.
    """
    generator, losses = torch.Generator().manual_seed(0), []
    model = MoE(CONFIG, 0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    data = torch.randn(2, comm.size, TOKENS // 16, 16, CONFIG.hidden, generator=generator)[
        :, comm.rank
    ].to(device)
    copies = spread(model.to(device), 2 if comm.size % 2 == 0 else 1)
    for _ in range(STEPS):
        model.zero_grad()
        loss = (model(data[0], Where()) - data[1]).square().sum() / (comm.size * data[0].numel())
        loss.backward()
        total = loss.detach()
        all_reduce(total, comm)
        for name, parameter in model.named_parameters():
            all_reduce(parameter.grad, copies if "experts" in name else comm)  # never divided by ep
            parameter.data -= RATE * parameter.grad
        losses.append(total.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Send by torch's all-to-all, and multiply by its grouped product."""

    def spread(model: nn.Module, ep: int) -> Communicator:
        mesh = init_device_mesh(device.type, (comm.size // ep, ep), mesh_dim_names=("edp", "ep"))[
            "ep"
        ]
        for parameter in model.routed.experts.parameters():
            parameter.data = parameter.data.chunk(ep)[mesh.get_local_rank()].clone()
        model.routed.compute = Dispatcher(model.routed.experts, mesh.get_group())
        return comm.split(comm.rank % ep)

    return train(comm, device, spread)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Let minidist change the layer."""

    def spread(model: nn.Module, ep: int) -> Communicator:
        mesh = Mesh(comm, Layout(dp=comm.size, ep=ep))
        expert_parallel.parallelize_experts(model, mesh)
        return mesh.over("edp")

    return train(comm, device, spread)


if __name__ == "__main__":
    run_twin(production, ours)
