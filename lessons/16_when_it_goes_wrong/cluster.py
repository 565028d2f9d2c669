"""Lesson 16 at full scale: a replica goes astray in the middle of a run, is found by a checksum,
and is mended.

    torchrun --nproc-per-node 4 lessons/16_when_it_goes_wrong/cluster.py              DistributedDataParallel
    torchrun --nproc-per-node 4 lessons/16_when_it_goes_wrong/cluster.py --minidist   minidist's DDP

In step 3 one weight of the last rank changes, as in a faulty memory. DDP would go on, averaging
gradients of different models. So the ranks compare 8 bytes after each step, and if these differ,
all get the weights that most ranks have. The two runs print the same losses only if both notice it
in the same step.

NCCL_DEBUG, TORCH_NCCL_TRACE_BUFFER_SIZE and their like are in lessons/NCCL.md. MINIDIST_LIMIT=60
has minidist tell who waits for whom after 60 seconds, MINIDIST_DEBUG=1 has it compare all calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full import DDP
from minidist.full.collectives import all_gather, broadcast

ROWS, STEPS, FAULT = 16, 5, 3


def checksum(model: nn.Module) -> Tensor:
    """Return 64 bits of all parameters, without leaving their device: each number's bits times an
    odd number, summed.

    Modulo 2^64 an odd factor loses nothing, so any change of one number shows; factors differ, so
    its place does, too.
    """
    bits = torch.cat(
        [parameter.detach().view(torch.int64).flatten() for parameter in model.parameters()]
    )
    odd = 2 * torch.arange(len(bits), device=bits.device) + 0x5851F42D4C957F2D
    return (bits * odd).sum().view(1)


def train(
    comm: Communicator,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module],
    finish: Callable[[nn.Module], object],
    gather: Callable[[Tensor], Tensor],
    send: Callable[[Tensor, int], object],
) -> list[float]:
    """Train, compare after each step, mend what is odd; return the mean losses."""
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    for parameter in plain.parameters():
        parameter.data.copy_(
            torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 4
        )
    rows = torch.randn(
        ROWS, 8, dtype=torch.float64, generator=generator.manual_seed(1 + comm.rank)
    ).to(device)
    model = wrap(plain.to(device))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = (model(rows).squeeze(1) - rows.sum(1)).square().mean()
        loss.backward()
        finish(model)
        optimizer.step()
        if step == FAULT and comm.rank == comm.size - 1:
            plain[0].weight.data[0, 0] += 1.0
        sums = gather(checksum(plain)).tolist()
        usual = max(sums, key=lambda found: (sums.count(found), -sums.index(found)))
        if any(found != usual for found in sums):
            for parameter in plain.parameters():
                send(parameter.data, sums.index(usual))
        losses.append(gather(loss.detach().view(1)).mean().item())
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train with torch.distributed, whose DDP has finished when backward has."""

    def gather(mine: Tensor) -> Tensor:
        everyones = mine.new_empty(comm.size)
        dist.all_gather(list(everyones.split(1)), mine)
        return everyones

    return train(comm, device, DistributedDataParallel, lambda model: None, gather, dist.broadcast)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train with minidist."""

    def wrap(plain: nn.Module) -> nn.Module:
        return DDP(plain, comm, op="mean")

    def gather(mine: Tensor) -> Tensor:
        return all_gather(mine, comm)  # type: ignore[return-value]

    return train(
        comm,
        device,
        wrap,
        DDP.synchronize,
        gather,
        lambda tensor, root: broadcast(tensor, comm, root),
    )


if __name__ == "__main__":
    run_twin(production, ours)
