"""What sharding hides behind computing, on a modelled machine whose clock says who waited for whom:
sent before or after, it is the same bytes, and the same numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist import Cluster, Communicator
from minidist.full import FSDP, DataParallel, ZeRO1, ZeRO2
from minidist.full.ddp.compress.compressed import CompressedDDP
from minidist.full.trace import Trace
from minidist.further import compressor_of

HIDDEN, LAYERS = 16, 5
BYTES = 2 * 4 * HIDDEN * HIDDEN  # of the two matrices of a layer, which are a bucket, or a unit


class Work(torch.autograd.Function):
    """The identity, whose forward and backward take a second of virtual time each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        with comm.span("forward", "compute"):
            comm.advance(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with ctx.comm.span("backward", "compute"):
            ctx.comm.advance(1.0)
        return gradients[0], None


class Layer(nn.Module):
    """Half of its gradients come before it works, and half behind it."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """Work between the two products."""
        y: Tensor = self.second(Work.apply(self.first(x), self.comm))  # type: ignore[no-untyped-call]
        return y


class Tower(nn.Module):
    """Layers, each a bucket or a unit, and a head of the same size, which the root unit has."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(comm) for _ in range(LAYERS - 1))
        self.head = Layer(comm)

    def forward(self, x: Tensor) -> Tensor:
        """Call one after the other."""
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def tower(comm: Communicator, kind: Any, **options: Any) -> DataParallel:
    if kind is not FSDP:
        options |= {"bucket_bytes": BYTES, "first_bucket_bytes": BYTES}
    wrapped: DataParallel = kind(Tower(comm), comm, op="sum", **options)
    return wrapped


def machine(seconds: float) -> Cluster:
    """Return one on which gathering a layer on two ranks, or reducing it to shards, takes so long."""
    return Cluster.uniform(latency=0, bandwidth=BYTES / 2 / seconds)


def began(trace: Trace, name: str) -> list[float]:
    """Return when each layer began to work on rank 0."""
    return [event.start for event in trace.events if event.rank == 0 and event.name == name]


@pytest.mark.parametrize("kind", (ZeRO1, ZeRO2))
@pytest.mark.parametrize("seconds", (0.5, 3.0))
def test_a_bucket_is_reduced_while_the_next_is_filled(kind: type[ZeRO1], seconds: float) -> None:
    """And a slow wire keeps ZeRO 2, which has room for two buckets, from filling a third."""

    def program(comm: Communicator) -> float:
        model = tower(comm, kind)
        loss = model(torch.ones(2, HIDDEN)).sum()
        started = comm.clock()
        loss.backward()
        return comm.clock() - started

    trace = Trace()
    took = minidist.run(program, 2, cluster=machine(seconds), trace=trace)
    hidden = LAYERS + seconds if seconds <= 1 else 1 + LAYERS * seconds
    assert took == pytest.approx([hidden] * 2, rel=1e-12)
    starts = began(trace, "backward")
    kept_waiting = kind is ZeRO2 and seconds > 1
    for layer in range(2, LAYERS):
        pause = seconds if kept_waiting else 1.0
        assert starts[layer] - starts[layer - 1] == pytest.approx(pause, rel=1e-12)


def test_a_bucket_is_compressed_and_sent_while_the_next_is_filled() -> None:
    def program(comm: Communicator) -> float:
        model = tower(comm, CompressedDDP, compress=compressor_of("int8"))
        loss = model(torch.ones(2, HIDDEN)).sum()
        started = comm.clock()
        loss.backward()
        return comm.clock() - started

    took = minidist.run(program, 2, cluster=machine(0.5))
    assert all(LAYERS < seconds < LAYERS + 0.5 for seconds in took)


def test_the_next_unit_is_gathered_and_the_last_one_reduced_beside_computing() -> None:
    def program(comm: Communicator) -> tuple[float, float]:
        model = tower(comm, FSDP)
        model(torch.ones(2, HIDDEN)).sum().backward()  # in this order from now on
        started = comm.clock()
        loss = model(torch.ones(2, HIDDEN)).sum()
        forward = comm.clock()
        loss.backward()
        return forward - started, comm.clock() - forward

    for forward, backward in minidist.run(program, 2, cluster=machine(0.25)):
        # before it: the root and the first layer; behind it: gradients of the first layer and the root
        assert forward == pytest.approx(LAYERS + 2 * 0.25, rel=1e-12)
        assert backward == pytest.approx(LAYERS + 2 * 0.25, rel=1e-12)


def test_new_parameters_are_gathered_while_forward_uses_those_that_are_there() -> None:
    def program(comm: Communicator) -> float:
        model = tower(comm, ZeRO1, overlap=True)
        assert isinstance(model, ZeRO1)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model(torch.ones(2, HIDDEN)).sum().backward()
        started = comm.clock()
        optimizer.step()
        model(torch.ones(2, HIDDEN))
        return comm.clock() - started

    took = minidist.run(program, 2, cluster=machine(0.5))
    assert took == pytest.approx([LAYERS + 0.5] * 2, rel=1e-12)
