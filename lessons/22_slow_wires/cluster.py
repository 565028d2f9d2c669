"""Lesson 22 at full scale: gradients as two thin matrices, then steps that each rank takes alone.

    torchrun --nproc-per-node 4 lessons/22_slow_wires/cluster.py              torch's PowerSGD hook, its model averager
    torchrun --nproc-per-node 4 lessons/22_slow_wires/cluster.py --minidist   CompressedDDP, DiLoCo

    steps 0, 1     DDP: torch's hook begins later, since DDP rebuilds its buckets after the first step
    steps 2 to 5   PowerSGD with two columns, and error feedback
    steps 6 to 9   local SGD: the ranks meet after every second step

torch keeps on each rank what the mean of all ranks misses, and we keep what the rank has not sent
itself. PowerSGD is linear, so only the sum over ranks matters, and that is the same. (Of top-k it
would not be true.) torch draws the first Q from a seed of its own; here both get the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.collectives import all_reduce
from minidist.full.ddp.compress.compressed import CompressedDDP
from minidist.further import compressor_of
from minidist.slow_wires import DiLoCo

ROWS, INPUTS, HIDDEN, RATE = 16, 12, 24, 0.02
PLAIN, SQUEEZED, ALONE = range(2), range(2, 6), range(6, 10)  # steps
COLUMNS, EVERY = 2, 2


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with one matrix that is worth compressing, and its optimizer."""
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=draws)
    model.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def first_factor(device: torch.device) -> torch.Tensor:
    """Return the Q that minidist begins with."""
    draws = torch.Generator().manual_seed(0)
    return torch.randn(INPUTS * COLUMNS, generator=draws, dtype=torch.float64).to(device)


def one_step(
    model: Any, optimizer: torch.optim.Optimizer, comm: Communicator, device: torch.device
) -> float:
    """Take a step on this rank's rows; return the loss, the mean over ranks."""
    draws = torch.Generator().manual_seed(comm.rank)
    rows = torch.randn(ROWS, INPUTS, dtype=torch.float64, generator=draws).to(device)
    optimizer.zero_grad()
    loss = (model(rows).squeeze(1) - rows[:, :3].sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    mean = loss.detach().reshape(1).clone()
    all_reduce(mean, comm, "mean")
    return float(mean)


def steps(
    numbers: range,
    model: Any,
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    device: torch.device,
    then: Callable[[], object] = lambda: None,
) -> list[float]:
    """Take some steps, and do something after each."""
    losses = []
    for _ in numbers:
        losses.append(one_step(model, optimizer, comm, device))
        then()
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """One DDP with a hook that begins to compress after two steps; then an averager."""
    model, optimizer = build(device)
    squeezed = DistributedDataParallel(model)
    state = PowerSGDState(None, COLUMNS, start_powerSGD_iter=len(PLAIN))
    state.q_memory_dict[0] = first_factor(device)
    state.p_memory_dict[0] = torch.empty(HIDDEN * COLUMNS, dtype=torch.float64, device=device)
    squeezed.register_comm_hook(state, powerSGD_hook)
    losses = steps(range(len(PLAIN) + len(SQUEEZED)), squeezed, optimizer, comm, device)
    del squeezed  # its hooks go with it
    averager = PeriodicModelAverager(EVERY, warmup_steps=EVERY - 1, process_group=dist.group.WORLD)
    copy, after = build(device)
    copy.load_state_dict(model.state_dict())
    return losses + steps(
        ALONE, copy, after, comm, device, lambda: averager.average_parameters(copy.parameters())
    )


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """DDP, CompressedDDP, and the outer optimizer with which the mean of all is what they share."""
    model, optimizer = build(device)
    plain = DDP(model, comm, op="mean")
    losses = steps(PLAIN, plain, optimizer, comm, device)
    plain.unwrap()
    way = compressor_of(f"powersgd:{COLUMNS}")
    squeezed = CompressedDDP(model, comm, op="mean", compress=way)
    losses += steps(SQUEEZED, squeezed, optimizer, comm, device)
    squeezed.unwrap()
    copy, after = build(device)
    copy.load_state_dict(model.state_dict())
    outer = DiLoCo(copy.parameters(), comm, EVERY, lr=1.0, momentum=0.0)
    return losses + steps(ALONE, copy, after, comm, device, outer.stepped)


if __name__ == "__main__":
    run_twin(production, ours)
