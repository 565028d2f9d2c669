"""Gradient checkpointing: keep the input of a function, and run the function again in backward.

    forward     x ──▶ function, unrecorded ──▶ y         keep x and the state of the random generator
    backward    x ──▶ function, recorded ──▶ y again ──▶ the gradients of x and of the parameters

If each of L layers is recomputed, a rank holds L inputs and the inside of one layer. Cost: one more
forward, a third of the work of a step. (Chen et al. 2016, "Sublinear memory cost".)
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]


def checkpoint(
    function: Function,
    x: Tensor,
    parameters: Iterable[nn.Parameter],
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `function(x)`, and compute it again in backward, with the same random numbers.

    A parameter of the function that is not among `parameters` gets no gradient. The function draws
    from `generator`, by default torch's own on the CPU.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    draws = generator or torch.default_generator
    result: Tensor = Again.apply(function, draws, x, *trained)  # type: ignore[no-untyped-call]
    return result


class Again(torch.autograd.Function):
    """A function whose backward begins with its forward."""

    @staticmethod
    def forward(
        ctx: Any, function: Function, generator: torch.Generator, x: Tensor, *trained: Tensor
    ) -> Tensor:
        """Run the function. Autograd records nothing in here, and so saves nothing."""
        ctx.function = function
        ctx.generator, ctx.state = generator, generator.get_state()
        ctx.save_for_backward(x, *trained)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run the function again, recorded, on a detached `x`; then go backward through this run."""
        x, *trained = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = ctx.generator.get_state()
        ctx.generator.set_state(ctx.state)
        with torch.enable_grad():
            y = ctx.function(x)
        ctx.generator.set_state(now)  # later numbers are drawn as if this had not happened
        gradients = torch.autograd.grad(y, [x, *trained], gradient, allow_unused=True)
        return None, None, *gradients


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Replace each layer's forward by a checkpoint around it. Its hooks stay outside of that."""
    for layer in layers:
        layer.forward = partial(recomputed, layer, layer.forward)


def recomputed(layer: nn.Module, forward: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """Return `forward(x, *others)`, and compute it again in backward."""
    return checkpoint(lambda x: forward(x, *others), x, layer.parameters())
