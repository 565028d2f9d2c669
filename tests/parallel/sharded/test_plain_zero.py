"""The plain page of ZeRO: in each stage the serial numbers, the formula's bytes, and the formula's
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from data_parallel import largest_difference
from torch import Tensor, nn

import minidist
from minidist.full.comm import Communicator
from minidist.full.ddp.after_backward import PlainDataParallel
from minidist.full.ddp.sampler import share
from minidist.full.fsdp import PlainUnit, PlainZeRO
from minidist.full.memory.account import Account

# nothing divides by 2 and 3, nor do the rows of the three steps
WIDTHS, ROWS, FROZEN = (5, 7, 7, 7, 3), (5, 4, 1), 1
EACH = pytest.mark.parametrize("stage", (1, 2, 3))
ON_RANKS = pytest.mark.parametrize("ranks", (1, 2, 3))
Held = dict[str, int]


def build(seed: int) -> list[nn.Module]:
    """Return layers that differ with the seed; one parameter is frozen."""
    draws = torch.Generator().manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()).double() for pair in pairwise(WIDTHS)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=draws)
    next(layers[FROZEN].parameters()).requires_grad_(False)
    return [*layers]


def sizes() -> list[int]:
    """Return the bytes of each layer's trained parameters."""
    return [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in build(0)]


def batches(ranks: int, rank: int) -> Iterator[list[tuple[Tensor, Callable[[Tensor], Tensor]]]]:
    """Yield for each step two microbatches: a rank's inputs, and its part of the loss."""
    for number, rows in enumerate(ROWS):
        draws = torch.Generator().manual_seed(number)
        inputs, targets = (
            torch.randn(2, rows, n, dtype=torch.float64, generator=draws) for n in (5, 3)
        )
        mine = share(rows, ranks, rank)
        yield [
            (x[mine], lambda y, wanted=wanted[mine], rows=rows: (y - wanted).square().sum() / rows)
            for x, wanted in zip(inputs, targets, strict=True)
        ]


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def parameters_of(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in nn.Sequential(*layers).named_parameters()}


@cache
def serial() -> dict[str, Tensor]:
    """Return the parameters after a run on one rank, with rank 0's layers."""
    layers = build(0)
    optimizer = adamw([p for layer in layers for p in layer.parameters() if p.requires_grad])
    for step in batches(1, 0):
        for x, loss in step:
            loss(nn.Sequential(*layers)(x)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(layers)


def plain_zero(comm: Communicator, stage: int) -> tuple[dict[str, Tensor], int, Held, list[int]]:
    """Train; return the parameters, the bytes sent meanwhile, the most held, and how many layers
    were whole.
    """
    layers, account = build(comm.rank), Account()
    zero = PlainZeRO(layers, comm, stage)
    optimizer = adamw(zero.shards)
    account.watch(nn.Sequential(*layers), optimizer)
    whole: list[int] = []

    def look(*_: object) -> None:
        whole.append(sum(unit.unsharded.untyped_storage().nbytes() > 0 for unit in zero.units))
        account.sample()

    for unit in zero.units:
        unit.layer.register_forward_pre_hook(look)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    before = comm.traffic.bytes
    for step in batches(comm.size, comm.rank):
        for x, loss in step:
            output = zero.forward(x)
            loss(output).backward()  # type: ignore[no-untyped-call]
            zero.backward(output.grad)
        zero.step(optimizer)
    sent = comm.traffic.bytes - before
    account.sample()
    for unit in zero.units:
        unit.unshard()
    return parameters_of(layers), sent, account.peaks, whole


@EACH
@ON_RANKS
def test_three_steps_are_those_of_one_rank_for_the_formulas_bytes(stage: int, ranks: int) -> None:
    states, sent, _, whole = zip(
        *minidist.run(lambda comm: plain_zero(comm, stage), ranks), strict=True
    )
    for state in states:
        assert largest_difference(state, serial()) <= 1e-9
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    gathered = 4 if stage == 3 else 1  # in a step of two microbatches; each of which reduces
    assert sum(sent) == len(ROWS) * (gathered + 2) * (ranks - 1) * sum(sizes())
    assert {max(each) for each in whole} == {1 if stage == 3 else len(sizes())}


def check_held(held: list[Held], stage: int) -> None:
    """Assert the page's table, but for an element more a shard where nothing divides, and for
    scalars.
    """
    ranks, n, largest, little = len(held), sum(sizes()), max(sizes()), 8 * 2 * len(sizes())
    frozen = next(build(0)[FROZEN].parameters()).nbytes
    assert sum(one["optimizer"] for one in held) <= 3 * n + ranks * little
    for one in held:
        assert one["optimizer"] <= 3 * (n / ranks + little)
        assert one["parameters"] <= frozen + (n if stage < 3 else largest) + little
        assert one["gradients"] <= (n if stage == 1 else largest) + n / ranks + little


@EACH
@pytest.mark.parametrize("ranks", (2, 3))
def test_what_is_held_is_what_the_table_says(stage: int, ranks: int) -> None:
    held = [found[2] for found in minidist.run(lambda comm: plain_zero(comm, stage), ranks)]
    check_held(held, stage)
    if stage < 3:
        with pytest.raises(AssertionError):
            check_held(held, stage + 1)


def test_data_parallelism_does_not_pass_for_zero() -> None:
    def program(comm: Communicator) -> Held:
        model, account = (
            PlainDataParallel(nn.Sequential(*build(comm.rank)), comm, op="sum"),
            Account(),
        )
        optimizer = adamw(model.parameters_to_reduce)
        account.watch(model, optimizer)
        for parameter in model.parameters_to_reduce:
            parameter.register_post_accumulate_grad_hook(lambda _: account.sample() and None)  # type: ignore[no-untyped-call]
        model(torch.ones(2, WIDTHS[0], dtype=torch.float64)).sum().backward()
        model.synchronize()
        optimizer.step()
        account.sample()
        return account.peaks

    held = minidist.run(program, 2)
    for stage in (1, 2, 3):
        with pytest.raises(AssertionError):
            check_held(held, stage)


def test_a_layer_that_is_away_is_nan_and_comes_back_to_the_same_memory() -> None:
    def program(comm: Communicator) -> None:
        layer = build(0)[0]
        before = parameters_of([layer])
        unit = PlainUnit(layer, comm)
        x = torch.ones(2, WIDTHS[0], dtype=torch.float64)
        output = layer(x)
        unit.reshard()
        assert all(parameter.isnan().all() for parameter in layer.parameters())
        unit.unshard()
        assert all(
            torch.equal(now, then)
            for now, then in zip(layer.parameters(), before.values(), strict=True)
        )
        output.sum().backward()  # with what autograd saved before it went
        gradients = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad()
        layer(x).sum().backward()
        assert all(
            torch.equal(p.grad, then) for p, then in zip(layer.parameters(), gradients, strict=True)
        )

    minidist.run(program, 2)


@pytest.mark.parametrize(
    ("layers", "stage", "said"),
    (
        (lambda: build(0), 4, "stage=4: ZeRO has the stages 1, 2 and 3"),
        (lambda: [*build(0), nn.Tanh()], 1, "layer 4, a Tanh, has nothing to train"),
        (
            lambda: [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())],
            2,
            "layer 0, a Sequential, .* one dtype",
        ),
        (
            lambda: build(0)[:2] * 2,
            3,
            "layer 0, a Sequential, has .* or a parameter of another layer",
        ),
    ),
)
def test_layers_that_cannot_be_cut_are_refused_in_a_sentence(
    layers: Any, stage: int, said: str
) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=said):
            PlainZeRO(layers(), comm, stage)
        assert comm.traffic.messages == 0

    minidist.run(program, 2)
