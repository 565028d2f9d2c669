"""A parameter server whose workers may be up to s steps ahead of the slowest.

    worker    waits for version max(0, t - s) ─▶ forward, backward ─▶ sends gradient t      t = 0, 1, 2 ...
    server    waits for gradient t of every worker ─▶ update t ─▶ sends version t + 1 to all

    s = 0     version t needs all gradients before t: bulk-synchronous, exactly the serial run
    s = 1     gradient t travels, and version t + 1 comes back, while a worker computes gradient t + 1
    s = k     a worker that stands still for k steps' time delays nobody; a slower one delays all in the end

A worker takes exactly the version t - s, also when a newer one has come. Therefore the numbers do not
depend on who is fast, and each gradient is that of weights s updates old: what `minidist/slow_wires.py` calls
d = s + 1. (A server that hands out the newest there is, as Ho et al. 2013 do, has gradients that are at
most so old, and other numbers in each run.)

Rank 0 serves, and computes nothing. Cost in a step, for n bytes of parameters and W workers: a worker
sends n bytes, and the server W n, through its one port. Memory: a worker keeps s + 1 versions, which
it has room for before they come. (Li et al. 2014, parameter server; Ho et al. 2013, SSP.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.comm import Communicator
from minidist.full.comm.request import Pending
from minidist.full.ddp.flatten import take_gradients, views_into

SERVER = 0


def serve(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    steps: int,
) -> None:
    """Update the parameters with the sum of all workers' gradients, step by step; on rank 0.

    The workers begin with its parameters. The optimizer lives here alone.
    """
    # One communicator each way: on NCCL a receive that is posted early delays later sends.
    down, workers = comm.split(0), range(1, comm.size)
    versions: deque[tuple[Tensor, list[Pending]]] = deque()
    room = [torch.empty(_size(parameters), dtype=parameters[0].dtype) for _ in workers]
    for step in range(steps + 1):
        if step > 0:
            coming = [comm.irecv(each, worker) for each, worker in zip(room, workers, strict=True)]
            for request in coming:
                request.wait()
            total = torch.stack(room).sum(0)
            for parameter, gradient in zip(
                parameters, views_into(total, list(parameters)), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
        flat = _flat(parameters)
        versions.append((flat, [down.isend(flat, worker) for worker in workers]))
        while versions and all(request.test() for request in versions[0][1]):
            versions.popleft()  # all workers have it
    for _, requests in versions:
        for request in requests:
            request.wait()


def work(
    parameters: Sequence[nn.Parameter],
    comm: Communicator,
    batches: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    stale: int = 0,
) -> list[float]:
    """Compute a gradient for each batch, with weights that are `stale` updates old; on other ranks
    than 0. Return this worker's losses.

    `loss_of(batch)` is this worker's part of the loss: the gradients of all workers are summed. In
    the end the parameters are those after the last update.

    Raises
    ------
    ValueError
        If `stale` is negative.
    """
    if stale < 0:
        raise ValueError(f"stale={stale}: a worker uses weights that are 0 or more updates old")
    versions: deque[tuple[Tensor, Pending]] = deque()  # those that come, oldest first
    down, asked, losses = comm.split(0), 0, []
    sending: deque[tuple[Tensor, Pending]] = deque()

    def take(version: int) -> None:
        """Wait for a version, and let the parameters be it; make room for later ones."""
        nonlocal asked
        while asked <= min(version + stale, len(batches)):
            room = torch.empty(_size(parameters), dtype=parameters[0].dtype)
            versions.append((room, down.irecv(room, SERVER)))
            asked += 1
        while asked - len(versions) <= version:
            flat, request = versions.popleft()
            request.wait()
            _fill(parameters, flat)

    for step, batch in enumerate(batches):
        take(max(0, step - stale))
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        gradient = take_gradients(list(parameters))
        sending.append((gradient, comm.isend(gradient, SERVER)))
        while sending[0][1].test() and len(sending) > 1:
            sending.popleft()
    take(len(batches))
    for _, request in sending:
        request.wait()
    return losses


def _size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@torch.no_grad()
def _fill(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    for parameter, values in zip(parameters, views_into(flat, list(parameters)), strict=True):
        parameter.copy_(values)
