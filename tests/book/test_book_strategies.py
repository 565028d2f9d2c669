"""DDP, ZeRO and FSDP on ranks that start different: serial numbers, counted bytes, bytes held."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.ddp import DDP, reduce_each, reduce_gradients
from minidist.fsdp import FSDP
from minidist.model import GPT, GPTConfig, cross_entropy_sum
from minidist.threads import run
from minidist.zero import PlainZeRO, ZeRO

TOKENS = torch.randint(31, (6, 9), generator=torch.Generator().manual_seed(1))
STEPS = 3


def model_of(seed: int, tied: bool) -> GPT:
    """Return a small GPT with a frozen matrix."""
    config = GPTConfig(vocabulary=31, layers=3, hidden=16, heads=2, sequence=8, tied=tied)
    model = GPT(config, seed, torch.float64)
    model.get_parameter("layers.1.mlp.up.weight").requires_grad_(False)
    return model


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return cross_entropy_sum(model(rows[:, :-1]), rows[:, 1:]) / 48


def serial(tied: bool) -> GPT:
    model = model_of(0, tied)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, TOKENS).backward()
        optimizer.step()
    return model


def wrapped(kind: str, model: GPT, comm: Communicator) -> DDP | ZeRO:
    if kind == "ddp":
        return DDP(model, comm, "sum", bucket_bytes=4096)
    if kind == "fsdp":
        return FSDP(model, comm, model.layers)
    return ZeRO(model, comm, int(kind[-1]), model.layers)


KINDS = ("ddp", "zero1", "zero2", "fsdp")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_bytes(kind: str, ranks: int, tied: bool) -> None:
    wanted = dict(serial(tied).named_parameters())
    trained = 8 * sum(p.numel() for p in wanted.values() if p.requires_grad)

    def program(comm: Communicator) -> float:
        model = model_of(comm.rank, tied)
        strategy = wrapped(kind, model, comm)
        optimizer = torch.optim.AdamW(strategy.trained, lr=1e-2)
        before = comm.traffic.bytes
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(strategy, TOKENS.tensor_split(ranks)[comm.rank]).backward()
            strategy.finish()
            optimizer.step()
            strategy.publish()
        sent = (comm.traffic.bytes - before) / STEPS
        if isinstance(strategy, FSDP):
            held = sum(unit.unsharded.untyped_storage().nbytes() for unit in strategy.units)
            assert held == 0, "nothing is whole between steps"
            for unit in strategy.units:
                unit.unshard()
        for name, parameter in model.named_parameters():
            off = (parameter - wanted[name]).abs().max()
            assert off <= 1e-9 * wanted[name].abs().max(), name
        return sent

    mean = sum(run(program, ranks)) / ranks
    outside = 8 * sum(p.numel() for n, p in wanted.items() if not n.startswith("layers"))
    share = (ranks - 1) / ranks
    gathered_twice = trained - outside if kind == "fsdp" else 0
    assert mean == pytest.approx(share * (2 * trained + gathered_twice))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plain_zero_is_serial_training(stage: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(5, 5, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    alone = nn.Sequential(*copy.deepcopy(layers))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        alone(x).square().sum().backward()
        optimizer.step()

    def program(comm: Communicator) -> None:
        own = copy.deepcopy(layers)
        zero = PlainZeRO(own, comm, stage)
        optimizer = torch.optim.AdamW(zero.shards, lr=0.1)
        for _ in range(STEPS):
            output = zero.forward(x.chunk(2)[comm.rank])
            output.square().sum().backward()
            zero.backward(output.grad)
            if stage >= 2:
                assert all(p.grad is None for layer in own for p in layer.parameters())
            zero.step(optimizer)
        for unit in zero.units:
            unit.unshard()
        for one, other in zip(nn.Sequential(*own).parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    run(program, 2)


@pytest.mark.parametrize("reduce", [reduce_each, reduce_gradients])
def test_gradients_are_averaged_where_that_is_asked(reduce: Any) -> None:
    def program(comm: Communicator) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float(comm.rank))
        reduce(list(model.parameters()), comm, "mean")
        return model.weight.grad.item()

    assert run(program, 3) == [1, 1, 1]


class Two(nn.Module):
    """Two layers, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        for number in numbers:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize("kind", KINDS[:3])  # under FSDP all ranks have to call the same layers
def test_a_parameter_that_one_rank_does_not_use_counts_as_zeros(kind: str) -> None:
    def program(comm: Communicator) -> list[float]:
        model = Two()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 2)
        strategy = wrapped(kind, model, comm)  # type: ignore[arg-type]
        strategy(torch.ones(1, 1), *range(comm.rank + 1)).sum().backward()
        strategy.finish()
        if kind == "ddp":
            return [parameter.grad.item() for parameter in model.parameters()]  # type: ignore[union-attr]
        return [unit.shard.grad.item() for unit in reversed(strategy.units) if len(unit.shard)]  # type: ignore[union-attr]

    found = run(program, 2)
    assert found[0] == [3, 2]  # 1 of the rank that stops early, and 2 of the other; 2 of one alone


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_each_microbatch_may_use_other_parameters(kind: str) -> None:
    def program(comm: Communicator) -> list[float]:
        model = wrapped(kind, Two(), comm)  # type: ignore[arg-type]
        with model.no_sync():
            model(torch.ones(1, 1), comm.rank).sum().backward()
            model.finish()
        model(torch.full((1, 1), 10.0), 0).sum().backward()
        model.finish()
        return [shard.grad.item() for shard in reversed(model.trained) if len(shard)]  # type: ignore[union-attr]

    assert run(program, 2)[0] == [21, 1]


@pytest.mark.parametrize("kind", ["zero1", "zero2", "fsdp"])
def test_backwards_may_follow_several_forwards(kind: str) -> None:
    serial = model_of(0, True)
    loss_of(serial, TOKENS).backward()

    def program(comm: Communicator) -> None:
        model = model_of(0, True)
        strategy = wrapped(kind, model, comm)
        with strategy.no_sync():
            losses = [loss_of(strategy, rows) for rows in TOKENS.chunk(6)[comm.rank :: 2]]
            for loss in losses:
                loss.backward()
        sent = comm.traffic.bytes
        strategy.finish()
        assert kind == "zero1" or comm.traffic.bytes == sent
        for parameter, start, stop, shard, offset in strategy.owned():
            name = next(name for name, each in model.named_parameters() if each is parameter)
            wanted = serial.get_parameter(name).grad.flatten()[start:stop]  # type: ignore[union-attr]
            torch.testing.assert_close(shard.grad[offset : offset + stop - start], wanted)  # type: ignore[index]

    run(program, 2)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_second_backward_before_finish_is_refused(kind: str) -> None:
    def program(comm: Communicator) -> None:
        strategy = wrapped(kind, model_of(0, False), comm)
        loss_of(strategy, TOKENS).backward()
        with pytest.raises(RuntimeError, match=r"call finish\(\) first, or use no_sync"):
            loss_of(strategy, TOKENS).backward()

    run(program, 2)


def test_evaluation_leaves_nothing_whole() -> None:
    def program(comm: Communicator) -> None:
        strategy = FSDP(model_of(0, False), comm, ())
        with torch.no_grad():
            loss_of(strategy, TOKENS)
        assert [unit.unsharded.untyped_storage().nbytes() for unit in strategy.units] == [0]

    run(program, 2)


def test_no_sync_adds_up_here_and_the_next_backward_sends_the_sum() -> None:
    def program(comm: Communicator) -> tuple[float, int]:
        model = DDP(nn.Linear(1, 1, bias=False), comm, "sum")
        before = comm.traffic.messages
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        assert comm.traffic.messages == before
        model(torch.full((1, 1), 10.0 * comm.rank)).sum().backward()
        model.finish()
        return model.trained[0].grad.item(), comm.traffic.messages - before  # type: ignore[union-attr]

    assert run(program, 2) == [(12, 2), (12, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_model_is_freed(kind: str) -> None:
    def program(comm: Communicator) -> bool:
        model = model_of(0, False)
        strategy = wrapped(kind, model, comm)
        loss_of(strategy, TOKENS).backward()
        strategy.finish()
        seen = weakref.ref(model.get_parameter("head.weight"))
        del strategy, model
        gc.collect()
        return seen() is None

    assert run(program, 2) == [True, True]
