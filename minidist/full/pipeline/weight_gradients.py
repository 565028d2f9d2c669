"""Weight gradients of linear layers in a pipeline: how they are added up, and when they are
computed.

    autograd    gᵀ x ─▶ a matrix ─▶ added to parameter.grad      the matrix written and read, the sum read and written
    here        parameter.grad += gᵀ x, by the product itself    the sum read and written
    put off     (x, g) wait here; the same, when there is time

Every microbatch adds to every gradient. If microbatches have few tokens, this takes a good part of
backward: a tenth on a CPU, with 128 tokens and D = 512. (Megatron-LM calls the remedy gradient
accumulation fusion.) Zero-bubble schedules put the products off: nobody waits for them, and they
fill the time in which a rank would idle. (Qi et al. 2023.)

If a weight has hooks, such as data parallelism's, its gradient comes from autograd, which runs the
hooks. So it does under autocast, whose products see 16-bit copies of weights.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.model.attention import at_autocast
from minidist.full.model.moe.experts import (
    Counts,
    Experts,
    add_weight_gradient,
    grouped,
    products,
    weight_gradient,
)
from minidist.full.precision.fp8 import Float8Multiply
from minidist.full.tensor.tensor_parallel import PartOfLinear


@dataclass(frozen=True, eq=False)
class Product:
    """The factors of a weight's gradient: the layer's input [.., I], and the gradient of its output
    [.., O].

    With experts, the rows [M, I] and [M, O] are sorted by expert, and `counts` says how many rows
    each expert has.
    """

    weight: nn.Parameter
    x: Tensor
    gradient: Tensor
    counts: Counts | None = None

    def compute(self) -> Tensor:
        """Return gᵀ x [O, I], or that of each expert [E, O, I]."""
        if self.counts is not None:
            return weight_gradient(self.x, self.gradient, self.counts)
        return self.gradient.flatten(0, -2).T @ self.x.flatten(0, -2)

    def add_to(self, total: Tensor) -> None:
        """Add what `compute` returns to `total`, by the product itself."""
        if self.counts is None:
            total.addmm_(self.gradient.flatten(0, -2).T, self.x.flatten(0, -2))
        else:
            add_weight_gradient(total, self.x, self.gradient, self.counts)

    def add_up(self) -> bool:
        """Add it to the weight's gradient, if that has one and no hooks.

        Tell whether this was done.
        """
        weight = self.weight
        if not weight.is_leaf:
            return False  # a copy in another dtype, of which autograd knows the origin
        hooked = weight._backward_hooks or weight._post_accumulate_grad_hooks
        if weight._grad is None or hooked or weight._grad.dtype != self.x.dtype:
            return False
        self.add_to(weight._grad)
        return True


class WeightGradients:
    """Computes the weight gradients of the linear layers, and of the experts, in this rank's
    stages.

    Attributes
    ----------
    put_off : bool
        Whether backward leaves products in `waiting`, for later.
    """

    def __init__(self) -> None:
        self.put_off = False
        self.waiting: list[Product] = []

    def take_over(self, module: nn.Module) -> None:
        """Let all linear layers and experts in `module`, cut or not, get their weight gradients
        from here.
        """
        for layer in module.modules():
            if any(isinstance(part, Float8Multiply) for part in layer.children()):
                continue  # its weight gradient is a product in 8 bits, too
            if isinstance(layer, Experts):
                layer.products = dict.fromkeys(layer.products, partial(multiply_grouped, self))
            elif isinstance(layer, PartOfLinear):
                layer.product = partial(multiply, self, layer, None)  # type: ignore[method-assign]
            elif type(layer) is nn.Linear:
                layer.forward = partial(multiply, self, layer, layer.bias)  # type: ignore[method-assign]

    def take(self) -> list[Product]:
        """Return the products that were put off since the last call, and forget them."""
        taken, self.waiting = self.waiting, []
        return taken


def compute(waiting: list[Product]) -> None:
    """Compute the products that were put off, and add them to `parameter.grad`."""
    with torch.no_grad():
        left = [product for product in waiting if not product.add_up()]
    if left:
        torch.autograd.backward([Backward.apply(product.weight, product) for product in left])  # type: ignore[no-untyped-call]


def multiply(
    owner: WeightGradients, layer: nn.Linear, bias: nn.Parameter | None, x: Tensor
) -> Tensor:
    """Return x Wᵀ, plus the bias if there is one, for x [.., I].

    The owner computes the gradient of W [O, I].
    """
    weight = layer.weight
    if not torch.is_grad_enabled() or not weight.requires_grad or not x.requires_grad:
        return nn.functional.linear(x, weight, bias)
    y: Tensor = Multiply.apply(*at_autocast(x, weight), owner, None)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def multiply_grouped(
    owner: WeightGradients, rows: Tensor, weight: nn.Parameter, counts: Counts
) -> Tensor:
    """Return what `grouped` does. The owner computes the gradient of `weight` [E, O, I]."""
    if not torch.is_grad_enabled() or not weight.requires_grad or not rows.requires_grad:
        return grouped(rows, weight, counts)
    return Multiply.apply(*at_autocast(rows, weight), owner, counts)  # type: ignore[no-any-return, no-untyped-call]


class Multiply(torch.autograd.Function):
    """x Wᵀ, of experts with their counts, whose backward computes the weight's gradient, or puts it
    off.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, owner: WeightGradients, counts: Counts | None
    ) -> Tensor:
        """Return [.., O] of x [.., I] and weight [O, I], or [M, O] of x [M, I] and weight [E, O,
        I].
        """
        ctx.save_for_backward(x, weight)
        # Hooks on saved tensors, such as recomputation's, may return a copy of the weight: keep the
        # parameter itself.
        ctx.parameter, ctx.owner, ctx.counts = weight, owner, counts
        return nn.functional.linear(x, weight) if counts is None else products(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradient of x, and that of the weight if autograd is to accumulate it."""
        x, weight = ctx.saved_tensors
        gradient = gradient if ctx.counts is None else gradient.contiguous()
        product = Product(ctx.parameter, x.detach(), gradient, ctx.counts)
        of_weight = None
        if ctx.owner.put_off:
            ctx.owner.waiting.append(product)
        elif not product.add_up():
            of_weight = product.compute()
        of_x = gradient @ weight if ctx.counts is None else products(gradient, weight, ctx.counts)
        return of_x, of_weight, None, None


class Backward(torch.autograd.Function):
    """A zero in forward; its backward is the gradient of a weight, so that autograd runs the
    weight's hooks.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, product: Product) -> Tensor:
        """Return a zero that depends on `weight`."""
        ctx.product = product
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Return gᵀ x."""
        return ctx.product.compute(), None
