"""The plain page of recomputation: the bits of the stored run, its draws, and no more bytes than
the fast one holds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_recompute import (
    SMALL,
    TWELVE,
    Meter,
    TorchDropout,
    batch,
    block_sizes,
    gradients,
    same_bits,
    step,
)
from torch import Tensor, nn

from minidist.full.model import GPT, Where
from minidist.full.recompute.plain import checkpoint


class Blocks(nn.ModuleList):
    """The blocks of a model; a loop over them recomputes each, by the plain page."""

    def __iter__(self) -> Iterator[Any]:
        for block in self._modules.values():
            assert block is not None
            yield lambda x, *args, block=block: checkpoint(
                lambda x: block(x, *args), x, block.parameters()
            )


def recomputing(model: Any) -> Any:
    model.layers = Blocks(model.layers)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_the_gpt_to_the_last_bit(dtype: torch.dtype) -> None:
    stored, again = GPT(SMALL, dtype=dtype), recomputing(GPT(SMALL, dtype=dtype))
    for model in (stored, again):
        model.get_parameter("layers.1.mlp.up.weight").requires_grad_(False)
    for tokens in (batch(), batch(2, seed=1)):  # gradients add up
        step(stored, tokens)
        step(again, tokens)
    assert same_bits(gradients(again), gradients(stored))


def test_dropout_draws_the_same_again_and_what_follows_draws_as_if_nothing_had_been() -> None:
    torch.manual_seed(0)
    stored, again = TorchDropout(), TorchDropout()
    again.load_state_dict(stored.state_dict())
    results = []
    for model in (stored, recomputing(again)):  # of whose first input no gradient is wanted
        torch.manual_seed(7)
        loss = model(torch.ones(4, 6)).square().sum()
        between = torch.rand(3)
        loss.backward()
        results.append((loss.detach(), between, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert same_bits(gradients(again), gradients(stored))


def test_a_generator_of_ones_own_draws_the_same_again() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.exp() * torch.rand(x.shape, generator=generator, dtype=x.dtype)

    results = []
    for recomputed in (False, True):
        x, draws = (
            torch.ones(5, dtype=torch.float64, requires_grad=True),
            torch.Generator().manual_seed(3),
        )
        function = partial(noisy, generator=draws)
        y = checkpoint(function, x, (), draws) if recomputed else function(x)
        between = torch.rand(2, generator=draws)
        y.sum().backward()
        results.append((y.detach(), between, torch.rand(2, generator=draws), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_held_are_the_inputs_and_at_the_peak_what_one_block_saves() -> None:
    c, activations = block_sizes()
    model, calls = recomputing(GPT(TWELVE)), []
    for number, block in model.layers._modules.items():
        block.register_forward_hook(lambda *_, number=int(number): calls.append(number))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    y = torch.randn(8, 64, 64, requires_grad=True)
    rotary = model.rotary(torch.arange(64), y.dtype)
    gc.disable()  # what is needed no more goes by itself, or is counted
    try:
        with Meter() as meter:
            for layer in model.layers:
                y = layer(y, rotary, Where())
            alive = [size for reference, size in meter.alive.values() if not reference.expired()]
            # outputs, and states of the generator
            assert sorted(alive)[-12:] == [c] * 12 and sum(alive) < 12.5 * c
            y.sum().backward()
    finally:
        gc.enable()
    assert calls == [*range(12), *reversed(range(12))]
    assert meter.peak == pytest.approx(activations + 12 * c, rel=0.02)
