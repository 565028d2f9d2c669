"""torch's own DDP, `fully_shard`, tensor and sequence parallelism on simulated ranks: the serial
model's numbers, and the bytes of the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from c10d_training import (
    BATCH,
    BYTES,
    OPTIMIZERS,
    RANKS,
    Meter,
    assert_same,
    batch,
    loss_of,
    model,
    numbers,
    on_ranks,
    rows_of,
    serial,
    started_different,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from minidist.full.comm import Communicator

Loss = Callable[[nn.Module, int], Tensor]
ROUND = (RANKS - 1) * BYTES  # what a rank sends, of P elements: it gathers or reduces them


class Strategy(NamedTuple):
    """One of torch's.

    Attributes
    ----------
    build
        Given the communicator, a model and its loss on this rank.
    sent
        Given the optimizer's name, the bytes that each rank sends in a step.
    serial, loss
        The model and loss that it has to equal.
    """

    build: Callable[[Communicator], tuple[nn.Module, Loss]]
    sent: Callable[[str], int]
    serial: Callable[[], nn.Module] = model
    loss: Loss = loss_of


def ddp(comm: Communicator) -> tuple[nn.Module, Loss]:
    net = DistributedDataParallel(started_different(comm.rank))  # it sends rank 0's
    return net, partial(loss_of, part=rows_of(comm.rank, comm.size))


def sharded(comm: Communicator, copies: int = 1) -> tuple[nn.Module, Loss]:
    shape, names = (comm.size,), ("shards",)
    if copies > 1:
        shape, names = (copies, comm.size // copies), ("copies", "shards")
    mesh, net = dist.init_device_mesh("cpu", shape, mesh_dim_names=names), model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), partial(loss_of, part=rows_of(comm.rank, comm.size))


def tensor_parallel(comm: Communicator) -> tuple[nn.Module, Loss]:
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model(), mesh, plan), loss_of


class Block(nn.Module):
    """A block of a transformer without its attention: [B, T, D] -> [B, T, D]."""

    T, D = 64, 64

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(self.D)
        self.up, self.down = nn.Linear(self.D, 4 * self.D), nn.Linear(4 * self.D, self.D)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def block_loss(net: nn.Module, step: int, part: slice = slice(None), ranks: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    shape = 2, Block.T, Block.D
    inputs, targets = (
        torch.randn(shape, generator=draw, dtype=torch.float64)[:, part] for _ in range(2)
    )
    return (net(inputs) - targets).square().mean() / ranks


def sequence_parallel(comm: Communicator) -> tuple[nn.Module, Loss]:
    mesh, rows = dist.init_device_mesh("cpu", (comm.size,)), Block.T // comm.size
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    part = slice(comm.rank * rows, (comm.rank + 1) * rows)
    loss = partial(block_loss, part=part, ranks=comm.size)
    return parallelize_module(Block(), mesh, plan), loss


def bytes_of_sequence_parallel(optimizer: str) -> int:
    """Gathered before `up`, reduced after `down`, and both again backward.

    The norm's gradients are partial sums, which torch reduces wherever the optimizer uses them:
    once in SGD, three times in AdamW. They are so small that log2(P) = 2 rounds send all of each.
    """
    activations = 4 * ROUND * 2 * Block.T * Block.D // RANKS
    return activations + 2 * Block.D * BYTES * 2 * {"sgd": 1, "adamw": 3}[optimizer]


STRATEGIES = {
    "DDP": Strategy(ddp, lambda _: 2 * ROUND * numbers() // RANKS),
    # gathered forward and backward, and reduced
    "fully_shard": Strategy(sharded, lambda _: 3 * ROUND * numbers() // RANKS),
    # the same in each half of the ranks, and a shard all-reduced between the halves
    "HSDP": Strategy(partial(sharded, copies=2), lambda _: (3 + 1) * BYTES * numbers() // 2),
    # an all-reduce of [B, 64] in log2(P) rounds
    "tensor parallel": Strategy(tensor_parallel, lambda _: 2 * BATCH * 64 * BYTES),
    "sequence parallel": Strategy(sequence_parallel, bytes_of_sequence_parallel, Block, block_loss),
}


def rank_trains(comm: Communicator, strategy: Strategy) -> dict[str, tuple[list[Tensor], Meter]]:
    dist.init_process_group("minidist")
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        net, loss = strategy.build(comm)
        meter = Meter(comm)
        train(net, optimizer(net.parameters()), meter, loss)
        found[name] = whole(net.parameters()), meter
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_torchs_own_strategies_give_the_serial_model_and_send_what_the_formula_says(
    name: str,
) -> None:
    strategy = STRATEGIES[name]
    results = on_ranks(partial(rank_trains, strategy=strategy))
    for optimizer in OPTIMIZERS:
        expected = serial(optimizer, strategy.serial, strategy.loss)
        sent = strategy.sent(optimizer)
        for parameters, meter in (rank[optimizer] for rank in results):
            assert_same(parameters, expected)
            # once, before the second step, DDP tells the ranks how it cuts its buckets from now on
            assert meter.steps[::2] == [sent] * 2
            assert meter.steps[1] - sent in (range(100) if name == "DDP" else [0])
            # the virtual clock has charged them: no link is faster
            assert meter.seconds > sent / 1e12


def at_low_precision() -> list[Tensor]:
    """Return what one rank arrives at that does as the ranks do: in bfloat16, sums in float32."""
    net, low = model().float(), model().bfloat16()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    for step in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(RANKS):
            low.load_state_dict(net.state_dict())
            low.zero_grad()
            inputs, targets = (tensor[rows_of(rank, RANKS)] for tensor in batch(step))
            (low(inputs.bfloat16()).float() - targets.float()).square().mean().backward()
            for parameter, own in zip(net.parameters(), low.parameters(), strict=True):
                assert parameter.grad is not None and own.grad is not None
                parameter.grad += own.grad.float() / RANKS
        optimizer.step()
    return whole(net.parameters())


def test_mixed_precision_of_fully_shard_sends_bfloat16_and_reduces_float32() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    def program(comm: Communicator) -> tuple[list[Tensor], list[int]]:
        dist.init_process_group("minidist")
        mesh, net = dist.init_device_mesh("cpu", (comm.size,)), model().float()
        fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        meter = Meter(comm)

        def loss(net: nn.Module, step: int) -> Tensor:
            inputs, targets = (one[rows_of(comm.rank, comm.size)].float() for one in batch(step))
            return (net(inputs) - targets).square().mean()

        train(net, OPTIMIZERS["adamw"](net.parameters()), meter, loss)
        return whole(net.parameters()), meter.steps

    reference = at_low_precision()
    gathered, reduced = (torch.finfo(dtype).bits // 8 for dtype in (torch.bfloat16, torch.float32))
    for found, sent in on_ranks(program):
        assert_same(found, reference, 1e-6)
        assert sent == [(2 * gathered + reduced) * (RANKS - 1) * numbers() // RANKS] * 3
