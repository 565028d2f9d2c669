"""Lesson 20 at full scale: measure a product and an all-reduce, predict a step of data parallelism,
then measure it.

    torchrun --nproc-per-node 4 lessons/20_cluster_for_a_month/cluster.py              DDP of torch
    torchrun --nproc-per-node 4 lessons/20_cluster_for_a_month/cluster.py --minidist   DDP of minidist, same wires

Rank 0 prints what it predicts beside what it measures. With few rows the gradients take longer than
the backward that hides them; ranks that share a GPU or a core are slower than one alone, which no
formula here knows.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator, budget
from minidist.course.twin import run_twin
from minidist.full import DDP

WIDTH, LAYERS, ROWS, STEPS, RATE = 512, 3, 256, 6, 2.0  # rows of each rank; float64


def seconds(work: Callable[[], object], device: torch.device, times: int = 9) -> float:
    """Return the median time of some work, which all ranks begin together."""
    found = []
    for _ in range(times):
        dist.barrier()
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - start)
    return median(found[1:])


def predict(parameters: int, ranks: int, device: torch.device) -> str:
    """Measure two parts of a step, and say how long the whole will be."""
    rows, weight = (
        torch.randn(ROWS, WIDTH, device=device).double(),
        torch.randn(WIDTH, WIDTH, device=device).double(),
    )
    rate = 2 * ROWS * WIDTH**2 / seconds(lambda: rows @ weight, device)
    gradients = torch.zeros(parameters, device=device).double()
    took = seconds(lambda: dist.all_reduce(gradients), device)
    # of bytes a second; one rank sends nothing
    bandwidth = max(1.0, budget.ring(ranks) * gradients.nbytes / took)
    computing = 6 * parameters * ROWS / rate
    # What two thirds of that, the backward, do not hide; a gradient here has 8 bytes.
    data = max(0.0, budget.ring(ranks) * 8 * parameters / bandwidth - 2 / 3 * computing)
    found = {"computing": computing, "data": data}
    parts = ", ".join(f"{seconds * 1e3:.2f} ms of {name}" for name, seconds in found.items())
    reached = f"{rate / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:.2f} GB/s reached"
    return f"{reached}: a step takes {sum(found.values()) * 1e3:.2f} ms, {parts}"


def train(
    spread: Callable[[nn.Module], Any], factor: int, comm: Communicator, device: torch.device
) -> list[float]:
    """Train on gradients of `factor` times the loss; return the loss of each step."""
    draws, layers = torch.Generator().manual_seed(0), []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), nn.Tanh()]
        nn.init.normal_(layers[-2].weight, std=WIDTH**-0.5, generator=draws)
    model = nn.Sequential(*layers).to(device)
    told = predict(sum(each.numel() for each in model.parameters()), comm.size, device)
    model, losses, took = spread(model), [], []
    batch = torch.randn(2, comm.size, ROWS, WIDTH, dtype=torch.float64, generator=draws)[
        :, comm.rank
    ].to(device)
    for _ in range(STEPS):
        dist.barrier()
        start = perf_counter()
        model.zero_grad()
        loss = (model(batch[0]) - batch[1]).square().sum() / (comm.size * batch[0].numel())
        (factor * loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())  # the CPU waits for the device here
        took.append(perf_counter() - start)
    if comm.rank == 0:
        print(f"predicted: {told}; measured: {median(took[1:]) * 1e3:.2f} ms", flush=True)
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch's DDP, which averages gradients."""
    places = [device.index] if device.type == "cuda" else None
    return train(
        lambda model: DistributedDataParallel(model, device_ids=places), comm.size, comm, device
    )


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with minidist's, which sums them."""
    return train(lambda model: DDP(model, comm, op="sum"), 1, comm, device)


if __name__ == "__main__":
    run_twin(production, ours)
