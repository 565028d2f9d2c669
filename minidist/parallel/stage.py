"""Stages of a pipeline: a serial model cut between its layers, from outside.

    stage 0   embedding │ layers.0 │ layers.1 │
    stage 1             │ layers.2 │ layers.3 │
    stage 2                        │ layers.4 │ norm │ head

What a stage does not have is replaced by the identity, so the model's own forward runs, and what its embedding would be
given is what the stage before returned. Names of parameters stay those of the serial model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return which layers belong to each stage: neighbours, at least one each, the most expensive stage the cheapest.

    Parameters
    ----------
    costs : sequence of float
        Of each layer, in any unit; equal ones give stages that differ by one layer at most.
    stages : int

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one: use fewer stages")

    @cache
    def best(first: int, left: int) -> tuple[float, float, int]:
        """Of `left` stages from layer `first` on: the largest cost, the sum of squares, where the first one ends."""
        if left == 1:
            return sum(costs[first:]), sum(costs[first:]) ** 2, len(costs)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            cost, (largest, squares, _) = sum(costs[first:end]), best(end, left - 1)
            found.append((max(cost, largest), cost**2 + squares, end))
        return min(found)

    parts: list[range] = []
    for left in range(stages, 0, -1):
        first = parts[-1].stop if parts else 0
        parts.append(range(first, best(first, left)[2]))
    return parts


def take_stage(
    model: nn.Module,
    layers: range,
    list_name: str = "layers",
    before: Sequence[str] = ("embedding",),
    after: Sequence[str] = ("norm", "head"),
) -> nn.Module:
    """Leave in `model` what a stage needs: these `layers`, and what is `before` the first or `after` the last of all.

    The model is changed and returned. A parameter that the first and the last stage share is on both: see `tied_names`.

    Raises
    ------
    ValueError
        If the model has no such list of layers, or fewer.
    """
    blocks = getattr(model, list_name, None)
    if not isinstance(blocks, nn.ModuleList) or not layers or layers[-1] >= len(blocks):
        missing = f"{list_name}.{layers[-1] if layers else 0}"
        raise ValueError(f"{type(model).__name__} has no {missing}: name its list of blocks with list_name=")
    last = len(blocks) - 1
    for index in range(len(blocks)):
        if index not in layers:
            del blocks._modules[str(index)]  # the others keep their numbers, and so their parameters their names
    for name in [*before] * (layers[0] > 0) + [*after] * (layers[-1] < last):
        setattr(model, name, nn.Identity())
    return model


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several. Ask before `take_stage`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


def join(modules: Iterable[nn.Module], names: Sequence[str]) -> nn.Parameter | None:
    """Let all parameters with one of these names be the first that is found in these modules; return it, if any."""
    first: nn.Parameter | None = None
    for module in modules:
        for name in names:
            owner, _, leaf = name.rpartition(".")
            place = dict(module.named_modules()).get(owner)
            if place is not None and leaf in place._parameters:
                first = first if first is not None else getattr(place, leaf)
                setattr(place, leaf, first)
    return first


class WeightQueue:
    """Weight gradients of linear layers that are still to be computed: what zero-bubble schedules put off.

    Backward through a deferred layer gives the gradient of its input, and leaves (input, output's gradient) here.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def defer(self, module: nn.Module) -> None:
        """Have all linear layers in `module` leave their weights' gradients here."""
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.forward = Deferred(self, layer)  # type: ignore[method-assign, assignment]

    def take(self) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
        """Return what has come since the last call, and forget it."""
        taken, self.waiting = self.waiting, []
        return taken


class Deferred:
    """The forward of a linear layer whose weight gets its gradient later."""

    def __init__(self, queue: WeightQueue, layer: nn.Linear) -> None:
        self.queue, self.layer = queue, layer

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, for x [..., inputs]."""
        weight, bias = self.layer.weight, self.layer.bias
        if not torch.is_grad_enabled() or not weight.requires_grad or not x.requires_grad:
            return nn.functional.linear(x, weight, bias)
        y: Tensor = InputGradient.apply(x, weight, self.queue)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias


class InputGradient(torch.autograd.Function):
    """x Wᵀ, whose backward computes the gradient of x alone."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: nn.Parameter, queue: WeightQueue) -> Tensor:
        """Return [..., outputs] of x [..., inputs] and weight [outputs, inputs]."""
        ctx.save_for_backward(x, weight)  # type: ignore[attr-defined]
        ctx.queue = queue  # type: ignore[attr-defined]
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x; leave what that of the weight needs in the queue."""
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.queue.waiting.append((weight, x.detach(), gradient))  # type: ignore[attr-defined]
        return gradient @ weight, None, None


class WeightGradient(torch.autograd.Function):
    """Nothing in forward; in backward the gradient of a weight, so that hooks on it run as ever."""

    @staticmethod
    def forward(ctx: object, weight: nn.Parameter, x: Tensor, gradient: Tensor) -> Tensor:
        """Return a zero that depends on `weight`."""
        ctx.save_for_backward(x, gradient)  # type: ignore[attr-defined]
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: object, _: Tensor) -> tuple[Tensor, None, None]:
        """Return gradientᵀ x."""
        x, gradient = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient.flatten(0, -2).T @ x.flatten(0, -2), None, None


def backward_weights(taken: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """Compute weight gradients that were put off, and add them to `parameter.grad`."""
    if taken:
        torch.autograd.backward([WeightGradient.apply(*one) for one in taken])  # type: ignore[no-untyped-call]
