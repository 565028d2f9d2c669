"""Recomputing: the bits of the stored run, its random draws, and no activation between the passes."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minidist.model import GPT, GPTConfig, cross_entropy_sum
from minidist.recompute import checkpoint, recompute_layers

CONFIG = GPTConfig(vocabulary=31, layers=3, hidden=16, heads=2, sequence=8)
TOKENS = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_the_gpt_to_the_last_bit(dtype: torch.dtype) -> None:
    found = []
    for recomputed in (False, True):
        model = GPT(CONFIG, 0, dtype)
        model.get_parameter("layers.1.mlp.up.weight").requires_grad_(False)
        if recomputed:
            recompute_layers(model.layers)  # type: ignore[arg-type]
        for rows in (TOKENS, TOKENS[:2]):  # gradients add up
            cross_entropy_sum(model(rows[:, :-1]), rows[:, 1:]).backward()  # type: ignore[no-untyped-call]
        found.append(gradients(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_dropout_draws_the_same_again_and_what_follows_draws_as_if_nothing_had_been() -> None:
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())
        function = partial(checkpoint, layer, parameters=layer.parameters())
        x = torch.ones(4, 6, requires_grad=True)
        y = function(x) if recomputed else layer(x)
        between = torch.rand(3)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([y.detach(), between, torch.rand(3), x.grad, *gradients(layer)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_generator_of_ones_own_draws_the_same_again() -> None:
    def noisy(x: Tensor, draws: torch.Generator) -> Tensor:
        return x.exp() * torch.rand(x.shape, generator=draws)

    found = []
    for recomputed in (False, True):
        x, draws = torch.ones(5, requires_grad=True), torch.Generator().manual_seed(3)
        function = partial(noisy, draws=draws)
        y = checkpoint(function, x, (), draws) if recomputed else function(x)
        between = torch.rand(2, generator=draws)
        y.sum().backward()  # type: ignore[no-untyped-call]
        found.append([y.detach(), between, torch.rand(2, generator=draws), x.grad])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_nothing_inside_is_held_between_the_passes_and_one_layer_at_a_time_in_backward() -> None:
    model, inside, alive = GPT(CONFIG, 0), [], []

    def look(_: nn.Module, inputs: Any) -> None:
        inside.append(weakref.ref(inputs[0]))  # what `down` saves, the largest of a layer
        alive.append(sum(reference() is not None for reference in inside))

    recompute_layers(model.layers)  # type: ignore[arg-type]
    for layer in model.layers:
        layer.get_submodule("mlp.down").register_forward_pre_hook(look)
    loss = cross_entropy_sum(model(TOKENS[:, :-1]), TOKENS[:, 1:])
    assert len(inside) == 3 and all(reference() is None for reference in inside)
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(inside) == 6 and max(alive) == 1
