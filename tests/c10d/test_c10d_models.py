"""torch's own DDP, `fully_shard` and tensor parallelism on simulated ranks: the serial model's
numbers, and the bytes of the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import minidist
from minidist import Cluster
from minidist.comm import Communicator

RANKS, STEPS, BATCH, BYTES = 4, 3, 8, 8


def model() -> nn.Sequential:
    """So large that the collectives take their rings, which send each element once."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


def train(net: nn.Module, part: slice, after_step: Callable[[], object]) -> None:
    """Three steps of Adam on this rank's part of each batch; torch's convention: the mean."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2, foreach=False)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 8, generator=draw, dtype=torch.float64)[part]
        targets = torch.randn(BATCH, 4, generator=draw, dtype=torch.float64)[part]
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
        after_step()


def share(comm: Communicator) -> slice:
    rows = BATCH // comm.size
    return slice(comm.rank * rows, (comm.rank + 1) * rows)


def ddp(comm: Communicator) -> tuple[nn.Module, slice]:
    if comm.rank:
        torch.manual_seed(comm.rank)
    net = model()
    if comm.rank:
        nn.init.ones_(net[0].weight)  # DDP sends rank 0's
    return DistributedDataParallel(net), share(comm)


def sharded(comm: Communicator) -> tuple[nn.Module, slice]:
    mesh, net = dist.init_device_mesh("cpu", (comm.size,)), model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), share(comm)


def tensor_parallel(comm: Communicator) -> tuple[nn.Module, slice]:
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model(), mesh, plan), slice(None)


def trained(comm: Communicator, build: Callable[..., Any]) -> tuple[list[Tensor], list[int], float]:
    """Return the parameters, the bytes that each step sent, and the seconds of the last."""
    dist.init_process_group("minidist")
    net, part = build(comm)
    sent, clock = [comm.traffic.bytes_sent], [comm.clock()]

    def after_step() -> None:
        sent.append(comm.traffic.bytes_sent)
        clock.append(comm.clock())

    train(net, part, after_step)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    bytes = [after - before for before, after in pairwise(sent)]
    return [parameter.detach() for parameter in whole], bytes, clock[-1] - clock[-2]


def bytes_of(build: Callable[..., Any], numbers: int) -> int:
    """Return what each rank sends in a step, of `numbers` parameters."""
    most = (RANKS - 1) * BYTES
    if build is tensor_parallel:  # an all-reduce of [B, 64]; small: log2(P) rounds of all of it
        return 2 * BATCH * 64 * BYTES
    rounds = 2 if build is ddp else 3  # gathered forward and backward, and reduced
    return rounds * most * numbers // RANKS


@pytest.mark.parametrize("build", [ddp, sharded, tensor_parallel])
def test_torchs_own_strategies_give_the_serial_model_and_send_what_the_formula_says(
    build: Callable[..., Any],
) -> None:
    serial = model()
    train(serial, slice(None), lambda: None)
    results = minidist.run(
        lambda comm: trained(comm, build), RANKS, torch=True, cluster=Cluster.h100(nodes=1)
    )
    expected = bytes_of(build, sum(parameter.numel() for parameter in serial.parameters()))
    for parameters, bytes, seconds in results:
        for parameter, other in zip(parameters, serial.parameters(), strict=True):
            torch.testing.assert_close(parameter, other.detach(), rtol=0, atol=1e-12)
        # once, before the second step, DDP tells the ranks how it cuts its buckets from now on
        assert bytes[::2] == [expected] * 2
        assert bytes[1] - expected in (range(100) if build is ddp else [0])
        assert seconds > expected / 1e12  # the virtual clock has charged them: no link is faster
