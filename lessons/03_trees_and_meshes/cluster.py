"""Lesson 03 at full scale: gradients are added over two levels, inside nodes and across.

    torchrun --nproc-per-node 4 lessons/03_trees_and_meshes/cluster.py              fully_shard on two levels (HSDP)
    torchrun --nproc-per-node 4 lessons/03_trees_and_meshes/cluster.py --minidist   task 4's steps, by this package

`fully_shard` on a mesh of (replicate, shard) takes the steps of task 4 apart: it reduce-scatters
gradients inside a node and all-reduces each shard across nodes, the optimizer updates the shards,
and the next forward all-gathers the new weights. On one machine two ranks play a node; on a
cluster, set PER_NODE to the GPUs of a node. NCCL chooses an algorithm by size, unless
NCCL_ALGO=Tree or Ring fixes it; NCCL_DEBUG=INFO prints the choice.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter

ROWS, WIDTH, STEPS, RATE, PER_NODE = 16, 24, 4, 0.1, 2


def model_and_data(
    rank: int, device: torch.device
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Build the same two layers on every rank, and rows of its own."""
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    ).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / WIDTH**0.5
            )
    generator.manual_seed(100 + rank)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return model.to(device), inputs.to(device), inputs.sum(1, keepdim=True).tanh().to(device)


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train by fully_shard on a mesh of nodes, and SGD."""
    model, inputs, targets = model_and_data(comm.rank, device)
    mesh = init_device_mesh(
        device.type, (comm.size // PER_NODE, PER_NODE), mesh_dim_names=("across", "inside")
    )
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss, comm))
    return losses


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with the gradient as one vector, of which each rank of a node updates its shard."""
    model, inputs, targets = model_and_data(comm.rank, device)
    inside, across = comm.split(comm.rank // PER_NODE), comm.split(comm.rank % PER_NODE)
    parameters = list(model.parameters())
    weights = torch.nn.utils.parameters_to_vector(parameters).detach()
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - targets).square().mean()
        gradient = torch.nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
        shard = reduce_scatter(gradient, inside, algorithm="ring")
        all_reduce(shard, across, algorithm="ring")
        mine = weights.tensor_split(inside.size)[inside.rank] - RATE * shard / comm.size
        weights = all_gather(mine, inside, out=torch.empty_like(weights), algorithm="ring")
        torch.nn.utils.vector_to_parameters(weights, parameters)
        losses.append(mean(loss, comm))
    return losses


def mean(loss: torch.Tensor, comm: Communicator) -> float:
    """Return the mean of all ranks' losses."""
    total = loss.detach().view(1).clone()
    all_reduce(total, comm)
    return total.item() / comm.size


if __name__ == "__main__":
    run_twin(production, ours)
