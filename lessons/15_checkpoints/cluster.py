"""Lesson 15 at full scale: train, save, read into a model built from another seed, go on.

    torchrun --nproc-per-node 4 lessons/15_checkpoints/cluster.py              fully_shard, torch.distributed.checkpoint
    torchrun --nproc-per-node 4 lessons/15_checkpoints/cluster.py --minidist   FSDP, minidist's store and restore

The checkpoint lies in a temporary folder of rank 0. On several machines, set TMPDIR to a folder
that all of them share.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from minidist import Communicator, Layout, Mesh
from minidist.course.twin import run_twin
from minidist.full import Recipe, parallelize
from minidist.full.checkpoint import saving
from minidist.full.collectives import all_reduce
from minidist.full.precision import MasterWeights

# rows of each rank; saved after the second of four steps
ROWS, WIDTH, RATE, SAVED, STEPS = 8, 10, 0.05, 2, 4


def build(seed: int, device: torch.device) -> nn.Sequential:
    """Return a model with weights drawn from a seed."""
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed))
    return model.to(device)


def train(comm: Communicator, device: torch.device, run: Any, steps: range) -> list[float]:
    """Take steps with this rank's rows, which depend on the step; return the mean losses."""
    (model, optimizer, forward_and_backward), losses = run, []
    for step in steps:
        x = torch.arange(1, 1 + ROWS * WIDTH, dtype=torch.float64, device=device).view(ROWS, WIDTH)
        model.zero_grad()
        loss = (
            forward_and_backward(torch.sin(x * (1 + comm.rank + comm.size * step))).detach().clone()
        )
        optimizer.step()
        all_reduce(loss, comm, op="mean")
        losses.append(loss.item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Save and load by torch.distributed.checkpoint."""

    def fresh(seed: int) -> Any:
        model: nn.Module = fully_shard(build(seed, device))

        def forward_and_backward(x: Tensor) -> Tensor:
            loss = mse_loss(model(x), x.flip(1))  # gradients are averaged
            loss.backward()
            return loss

        return model, torch.optim.AdamW(model.parameters(), lr=RATE), forward_and_backward

    losses = train(comm, device, run := fresh(seed=0), range(SAVED))
    with tempfile.TemporaryDirectory() as mine:
        folder = comm.all_gather_object(mine)[0]
        dcp.save(
            dict(zip(("model", "optimizer"), get_state_dict(*run[:2]), strict=True)),
            checkpoint_id=folder,
        )
        weights, moments = get_state_dict(*(again := fresh(seed=1))[:2])
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(*again[:2], model_state_dict=weights, optim_state_dict=moments)
        comm.barrier()  # all have read by now
    return losses + train(comm, device, again, range(SAVED, STEPS))


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Save by the trainer's writer, load by its pieces."""
    mesh = Mesh(comm, Layout(dp=comm.size))

    def fresh(seed: int) -> Any:
        parallel = parallelize(
            build(seed, device), mesh, Recipe(zero=3), lambda y, x: mse_loss(y, x) / comm.size
        )
        groups = [{"params": list(parallel.model.parameters())}]
        optimizer = parallel.optimizer(MasterWeights, groups, optimizer=torch.optim.AdamW, lr=RATE)
        return parallel, optimizer, lambda x: parallel.step([x], [x.flip(1)]) * comm.size

    losses = train(comm, device, run := fresh(seed=0), range(SAVED))
    with tempfile.TemporaryDirectory() as mine:
        writer = saving.Writer(Path(comm.all_gather_object(mine)[0]), comm, keep=1, every=0)
        writer.save(SAVED, saving.pieces_to_save(*run[:2]), {})  # in the background
        writer.wait()
        saving.load_pieces(writer.folder / f"step-{SAVED:08d}", *(again := fresh(seed=1))[:2])
        again[0].stepped()
        comm.barrier()
    return losses + train(comm, device, again, range(SAVED, STEPS))


if __name__ == "__main__":
    run_twin(production, ours)
