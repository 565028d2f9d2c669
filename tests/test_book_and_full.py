"""What the book and `full/` have twice is the same: where one could not be built on the other, these
tests hold them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from minidist import checkpoint, model, moe, pipeline, precision, recompute, threads
from minidist.full.checkpoint import pieces
from minidist.full.model import GPT, GPTConfig, Where
from minidist.full.model.mlp import sizes
from minidist.full.model.moe.balance import rebalance
from minidist.full.model.moe.losses import balance_loss
from minidist.full.model.moe.routed import RoutedExperts
from minidist.full.pipeline import plan
from minidist.full.precision import LossScaler, MasterWeights
from minidist.full.recompute import checkpoint as recomputed
from minidist.tensor import Block

GROUPED = GPTConfig(vocabulary=37, layers=3, hidden=32, heads=4, key_value_heads=2, sequence=16)
EXPERTS = replace(GROUPED, experts=4, top_k=2, balance="bias", balance_rate=0.25)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_the_same_seed_gives_the_same_model_and_it_the_same_gradients(
    tied: bool, dtype: torch.dtype
) -> None:
    config = replace(GROUPED, tied=tied)
    ours, page = GPT(config, seeded(3), dtype), model.GPT(sizes(config), 3, dtype)
    tokens, targets = torch.randint(37, (2, 2, 9), generator=seeded(1))
    assert [*ours.state_dict()] == [*page.state_dict()]
    for each in (ours, page):
        backward(model.cross_entropy_sum(each(tokens), targets))
    for (name, mine), theirs in zip(ours.named_parameters(), page.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine, theirs) and torch.equal(mine.grad, theirs.grad), name
    later = ours(tokens, Where(positions=5))
    assert torch.equal(ours(tokens), page(tokens)) and torch.equal(later, page(tokens, first=5))


@pytest.mark.parametrize("ranks", range(1, 7))
def test_schedules_are_the_same_action_by_action(ranks: int) -> None:
    for name, schedule in pipeline.SCHEDULES.items():
        for microbatches in range(1, 14):
            ours = plan(name, ranks, microbatches)
            actions = [[(str(a.kind), a.microbatch) for a in row] for row in ours.actions]
            assert actions == [list(map(tuple, row)) for row in schedule(ranks, microbatches)]
            assert all(
                action.stage == rank for rank in range(ranks) for action in ours.actions[rank]
            )


def test_float16_trains_alike_through_an_overflow() -> None:
    """The book scales, skips, and updates masters as `MasterWeights` and `LossScaler` do."""
    ours, page = (nn.Linear(8, 4).half() for _ in range(2))
    page.load_state_dict(ours.state_dict())
    inputs = torch.randn(6, 5, 8, generator=seeded()).half()
    inputs[2] *= torch.inf

    def of_page(comm: object) -> list[float]:
        mixed = precision.MixedPrecision([*page.parameters()], 0.01, comm)  # type: ignore[arg-type]
        scales = []
        for x in inputs:
            backward(page(x).float().square().mean() * mixed.scale)
            mixed.step()
            scales.append(mixed.scale)
        return scales

    scaler, scales = LossScaler(interval=precision.GROWTH_INTERVAL), []
    optimizer = MasterWeights(ours.parameters(), torch.optim.AdamW, lr=0.01)
    for x in inputs:
        backward(scaler.scale_loss(ours(x).float().square().mean()))
        gradients = [p.grad.float().flatten() for p in ours.parameters() if p.grad is not None]
        overflow = scaler.overflowed(torch.cat(gradients).norm())
        if not overflow:
            optimizer.step(factor=1 / scaler.scale)
        optimizer.zero_grad()
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert threads.run(of_page, 1) == [scales] and scales == [2.0**16] * 2 + [2.0**15] * 4
    for mine, theirs in zip(ours.parameters(), page.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_both_checkpoints_recompute_to_the_same_gradients() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    found = []
    again: dict[str, Callable[[Tensor], Tensor]] = {
        "stored": layer,
        "page": lambda x: recompute.checkpoint(layer, x, layer.parameters()),
        "ours": partial(recomputed, layer),
    }
    for run in again.values():
        torch.manual_seed(4)
        x = torch.randn(5, 6, requires_grad=True)
        y = run(x)
        layer.zero_grad()
        backward(y.square().sum())
        found.append([y, x.grad, *(p.grad for p in layer.parameters()), torch.rand(1)])
    for others in zip(*found, strict=True):
        assert all(torch.equal(others[0], other) for other in others[1:])


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_a_piece_is_the_same_elements(dim: int) -> None:
    shape = (4, 5, 6)
    whole = torch.arange(120.0).view(shape)
    for first, last, start in ((0, shape[dim], 7), (1, 3, 0), (2, 4, 11)):
        block = Block(torch.Size(shape), dim, first, last)
        count = 120 // shape[dim] * (last - first) - start - 3
        places = checkpoint.places_of(checkpoint.Piece("w", block, start, torch.empty(count)))
        extent = pieces.Extent(shape, dim, first, last, start, start + count)
        assert torch.equal(whole.flatten()[places], pieces.take(whole, extent))


def test_experts_are_chosen_weighed_and_balanced_alike() -> None:
    layer = RoutedExperts(EXPERTS, 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=seeded(parameter.dim()))
    layer.bias += torch.tensor([1, 0, -1, 2])
    bias = layer.bias * EXPERTS.balance_rate
    x = torch.randn(1, 13, 32, dtype=torch.float64, generator=seeded(5))

    def expert(number: int, rows: Tensor) -> Tensor:
        return layer.experts(rows, [len(rows) * (each == number) for each in range(4)])

    experts = [partial(expert, number) for number in range(4)]
    wanted, counts = moe.mixture(x[0], layer.router, experts, 2, bias)
    found = layer(x)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-14)
    backward(found.sum())
    assert layer.tally[:4].tolist() == counts.tolist()
    scores = (x @ layer.router.T).softmax(-1)
    chosen = nn.functional.one_hot(layer.choose(scores), 4).sum(2)
    mean = balance_loss(scores, chosen, lambda each: each) / 13
    torch.testing.assert_close(mean, moe.balance_loss(scores[0], counts))
    moe.rebalance(bias, counts, EXPERTS.balance_rate)
    rebalance(layer, sizes=(1, 4))
    assert torch.equal(layer.bias * EXPERTS.balance_rate, bias)
