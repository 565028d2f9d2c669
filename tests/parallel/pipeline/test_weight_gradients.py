"""Gradients of linear layers in a pipeline: added up by the product itself, or put off; hooks see
them come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.full.pipeline.weight_gradients import WeightGradients, compute


class Seen(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it."""
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, bias=False)).double()
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def microbatch(number: int) -> Tensor:
    return torch.randn(
        2, 3, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64
    ).requires_grad_()


def expected(count: int) -> list[Tensor]:
    plain = model()
    for number in range(count):
        plain(microbatch(number)).square().sum().backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


def same(one: nn.Module, gradients: list[Tensor]) -> bool:
    return all(
        torch.allclose(p.grad, g, rtol=1e-12)
        for p, g in zip(one.parameters(), gradients, strict=True)
    )  # type: ignore[arg-type]


def test_the_product_adds_to_the_gradient_that_is_there() -> None:
    made, owner = model(), WeightGradients()
    owner.take_over(made)
    made(microbatch(0)).square().sum().backward()
    first = made[1].weight.grad
    loss = made(microbatch(1)).square().sum()
    with Seen() as seen:
        loss.backward()
    assert made[1].weight.grad is first and same(made, expected(2))
    assert seen.names.count("aten.addmm_.default") == 2
    assert seen.names.count("aten.mm.default") == 2, "those of the inputs; none for a weight"


def test_what_is_put_off_waits_until_it_is_computed() -> None:
    made, owner = model(), WeightGradients()
    owner.take_over(made)
    owner.put_off = True
    x = microbatch(0)
    made(x).square().sum().backward()
    assert made[0].weight.grad is made[1].weight.grad is None and x.grad is not None
    taken = owner.take()
    assert len(taken) == 2 and owner.waiting == []
    compute(taken)
    assert same(made, expected(1))


def test_hooks_see_every_gradient_come() -> None:
    """Data parallelism's run after accumulation, tensor parallelism's before; both ways of
    computing run them.
    """
    made, owner, calls = model(), WeightGradients(), {"before": 0, "after": 0}
    owner.take_over(made)
    last = torch.zeros(4, 5, dtype=torch.float64)

    def before(gradient: Tensor | None) -> Tensor | None:
        calls["before"] += gradient is not None
        return gradient

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        # autograd also comes with nothing, when it is put off
        calls["after"] += not torch.equal(parameter.grad, last)
        last.copy_(parameter.grad)

    made[0].weight.register_hook(before)
    made[1].weight.register_post_accumulate_grad_hook(after)
    for number in range(3):
        owner.put_off = number == 1
        made(microbatch(number)).square().sum().backward()
        compute(owner.take())
    assert calls == {"before": 3, "after": 3} and same(made, expected(3))


def test_a_frozen_weight_gets_none_and_a_first_layer_needs_no_gradient_of_its_input() -> None:
    made, owner = model(), WeightGradients()
    owner.take_over(made)
    made[1].weight.requires_grad_(False)
    made(microbatch(0).detach()).square().sum().backward()
    assert made[1].weight.grad is None
    assert torch.allclose(made[0].weight.grad, expected(1)[0], rtol=1e-12)
