"""A model, its batches and its steps, on ranks of any kind: what the tests of torch's own strategies
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minidist
from minidist import Cluster
from minidist.full.comm import Communicator

RANKS, STEPS, BATCH, BYTES = 4, 3, 8, 8

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
}


def model() -> nn.Sequential:
    """So large that the collectives take their rings, which send each element once."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=draw, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 4, generator=draw, dtype=torch.float64)


def rows_of(rank: int, ranks: int) -> slice:
    """Return a rank's part of a batch."""
    rows = BATCH // ranks
    return slice(rank * rows, (rank + 1) * rows)


def loss_of(net: nn.Module, step: int, part: slice = slice(None)) -> Tensor:
    """Return the mean over this rank's part: torch's convention."""
    inputs, targets = (tensor[part] for tensor in batch(step))
    return (net(inputs) - targets).square().mean()


def started_different(rank: int) -> nn.Module:
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    return net


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[], object] = lambda: None,
    loss: Callable[..., Tensor] = loss_of,
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step).backward()
        optimizer.step()
        after_step()


class Meter:
    """What a rank sends between one call and the next, and how long the last took."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.sent, self.clock = comm, [comm.traffic.bytes], [comm.clock()]

    def __call__(self) -> None:
        self.sent.append(self.comm.traffic.bytes)
        self.clock.append(self.comm.clock())

    @property
    def steps(self) -> list[int]:
        return [after - before for before, after in pairwise(self.sent)]

    @property
    def seconds(self) -> float:
        return self.clock[-1] - self.clock[-2]


def whole(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters, or gradients, as the serial model has them."""
    full = (one.full_tensor() if isinstance(one, DTensor) else one for one in parameters)
    return [tensor.detach().clone() for tensor in full]


def serial(
    optimizer: str,
    build: Callable[[], nn.Module] = model,
    loss: Callable[..., Tensor] = loss_of,
) -> list[Tensor]:
    """Return the parameters that one rank alone arrives at."""
    net = build()
    train(net, OPTIMIZERS[optimizer](net.parameters()), loss=loss)
    return whole(net.parameters())


def numbers() -> int:
    """Return how many parameters the model has."""
    return sum(parameter.numel() for parameter in model().parameters())


def on_ranks(program: Callable[[Communicator], Any], ranks: int = RANKS, **options: Any) -> Any:
    """Run a program of torch.distributed on simulated ranks."""
    cluster = Cluster.h100(nodes=1)
    return minidist.run(program, ranks, torch=True, cluster=cluster, **options)


def assert_same(found: list[Tensor], expected: list[Tensor], most: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=most)
