"""Lesson 21 at full scale: a rank is lost, the others go on, and a new one takes its place.

    torchrun --nproc-per-node 4 lessons/21_machines_fail/cluster.py              DistributedDataParallel, broadcast
    torchrun --nproc-per-node 4 lessons/21_machines_fail/cluster.py --minidist   DDP, a peer that sends

    steps 0, 1   all ranks
    steps 2, 3   all but the last: they share the same batches, and accumulate
    steps 4, 5   all ranks: the last has forgotten everything, and gets weights and moments

The lost rank is only told to forget. To lose one in earnest: `python -m minidist launch --replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.collectives import all_reduce
from minidist.full.ddp.sampler import share

ROWS, LARGEST, WIDTH, RATE = 12, 3, 6, 0.02  # rows of a global batch, and of a microbatch at most
Tensors = Sequence[Tensor]
Wrap = Callable[[nn.Module, Communicator], Any]
Fill = Callable[[Tensors, Communicator, bool], None]


def phases(ranks: int) -> list[tuple[int, range]]:
    """Return how many ranks there are in which steps."""
    return [(ranks, range(2)), (max(1, ranks - 1), range(2, 4)), (ranks, range(4, 6))]


def begin(device: torch.device, done: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensors]:
    """Return a new model, its optimizer, and all tensors that a run carries on."""
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draws)
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=RATE)
    carried = []
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(done)), **moments}
        carried += [parameter.data, *moments.values()]
    return model, optimizer, carried


def one_step(model: Any, optimizer: torch.optim.Optimizer, comm: Communicator, step: int) -> float:
    """Train on a rank's share of a global batch, in microbatches; return the batch's mean loss."""
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draws)
    rows = rows[share(ROWS, comm.size, comm.rank)].to(device)
    count = ceil(ceil(ROWS / comm.size) / LARGEST)
    optimizer.zero_grad()
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for number, part in enumerate(rows.tensor_split(count), start=1):
        with nullcontext() if number == count else model.no_sync():
            loss = (model(part).squeeze(1) - part.sum(1)).square().sum() / ROWS
            (comm.size * loss).backward()  # the mean over ranks is then a sum
        total += loss.detach()
    optimizer.step()
    all_reduce(total, comm)
    return float(total)


def train(comm: Communicator, device: torch.device, wrap: Wrap, fill: Fill) -> list[float]:
    """Go through the phases; return the losses, which all ranks get from the first."""
    losses: list[float] = []
    held: Tensors = ()
    for ranks, steps in phases(comm.size):
        here = comm.split(0 if comm.rank < ranks else 1)
        if comm.rank >= ranks:
            held = ()  # its process has ended
            continue
        plain, optimizer, carried = begin(device, steps.start)
        for tensor, before in zip(carried, held, strict=False):
            tensor.copy_(before)
        fill(carried, here, steps.start > 0 and not held)
        model = wrap(plain, here)
        losses += [one_step(model, optimizer, here, step) for step in steps]
        held = carried
    return list(comm.all_gather_object(losses)[0])


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Torch's DDP on a group of those who are left; rank 0's tensors are broadcast."""
    groups = {ranks: dist.new_group(range(ranks)) for ranks, _ in phases(comm.size)}

    def wrap(model: nn.Module, here: Communicator) -> Any:
        return DistributedDataParallel(model, process_group=groups[here.size])

    def fill(tensors: Tensors, here: Communicator, new: bool) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=groups[here.size])

    return train(comm, device, wrap, fill)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Minidist's DDP, on a communicator of those who are left; a peer sends to whoever is new."""

    def fill(tensors: Tensors, here: Communicator, new: bool) -> None:
        for rank, needy in enumerate(here.all_gather_object(new)):
            for tensor in tensors if needy else ():
                if here.rank == 0:
                    here.send(tensor, to=rank)
                elif here.rank == rank:
                    here.recv(tensor, source=0)

    return train(comm, device, lambda model, here: DDP(model, here, op="mean"), fill)


if __name__ == "__main__":
    run_twin(production, ours)
