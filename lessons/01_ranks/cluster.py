"""Lesson 01 at full scale: neighbours in a ring average their weights, and no collective is called.

    torchrun --nproc-per-node 4 lessons/01_ranks/cluster.py              torch.distributed's send, recv and P2POp
    torchrun --nproc-per-node 4 lessons/01_ranks/cluster.py --minidist   the same messages, by this package

A linear regression in float64. After its own step each rank takes the mean of its weights and its
left neighbour's: gossip (Lian et al. 2017, arXiv 1705.09056), for which messages to neighbours are
enough. At the end a token goes around the ring twice: first it collects the losses, then it tells
every rank the sums. With NCCL, a send and a receive that every rank posts at once have to be in one
batch. Posted one after the other, they wait for each other on the GPU, as blocking sends do in this
lesson.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from minidist import Communicator
from minidist.course.twin import run_twin

ROWS, WEIGHTS, STEPS, RATE = 32, 20, 5, 0.1
Message = Callable[[torch.Tensor, int], object]  # a buffer, and to whom or from whom
# what leaves, to whom, what comes, from whom
Shift = Callable[[torch.Tensor, int, torch.Tensor, int], object]


def train(
    comm: Communicator, device: torch.device, shift: Shift, send: Message, recv: Message
) -> list[float]:
    """Train; return the mean loss over all ranks, of each step."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(ROWS, WEIGHTS, dtype=torch.float64, generator=generator).to(device)
    targets = inputs.sum(1) / WEIGHTS**0.5
    weights = torch.zeros(WEIGHTS, dtype=torch.float64, device=device)
    losses = torch.zeros(STEPS, dtype=torch.float64, device=device)
    neighbours = torch.empty_like(weights)
    for step in range(STEPS):
        error = inputs @ weights - targets
        losses[step] = (error**2).mean() / comm.size
        weights -= RATE * (inputs.T @ error) / ROWS
        shift(weights, right, neighbours, left)
        weights = (weights + neighbours) / 2
    for lap in ("collect", "tell"):
        token = torch.empty_like(losses)
        if comm.rank > 0:
            recv(token, left)
            losses = losses + token if lap == "collect" else token
        send(losses, right)
        if comm.rank == 0:
            recv(token, left)
            losses = token
    return losses.tolist()


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Send by torch.distributed."""

    def shift(leaving: torch.Tensor, to: int, arriving: torch.Tensor, source: int) -> None:
        both = [dist.P2POp(dist.isend, leaving, to), dist.P2POp(dist.irecv, arriving, source)]
        for request in dist.batch_isend_irecv(both):
            request.wait()

    return train(comm, device, shift, dist.send, dist.recv)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Send by minidist."""
    return train(comm, device, comm.exchange, comm.send, comm.recv)


if __name__ == "__main__":
    run_twin(production, ours)
