"""Experts: several MLPs whose matrices are stacked, each for some of the rows.

    rows, sorted by expert      r r r r │ r │ │ r r         counts [4, 1, 0, 2]
    gate, up [E, F, D]          expert 0 │ 1 │2│ 3          one product for each expert that has rows
    down     [E, D, F]

An expert without rows computes nothing, and its gradient is zero, not missing: the stack is one
parameter. The products are called *grouped*. On GPUs that have one, a single kernel computes all of
them; elsewhere a loop does, which writes each product where it belongs.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.model.attention import at_autocast

Counts: TypeAlias = list[int]
"""How many rows each expert has."""

GroupedProduct: TypeAlias = Callable[[Tensor, nn.Parameter, Counts], Tensor]
"""What `grouped` is."""

KERNEL_DEVICES = ("cuda",)  # where torch's grouped kernel is worth asking for


class Experts(nn.Module):
    """SwiGLU of E experts; a rank may hold some of them.

    Attributes
    ----------
    products : dict
        The function that multiplies by each matrix. A pipeline that puts weight gradients off
        replaces them, and so do products in 8 bits.
    numbers : range
        Which of all `count` experts these are.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.up = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.products: dict[str, GroupedProduct] = dict.fromkeys(("gate", "up", "down"), grouped)
        self.count, self.numbers = experts, range(experts)

    def forward(self, rows: Tensor, counts: Counts) -> Tensor:
        """Map rows [M, D], sorted by expert; `counts` has one number for each expert, and they add
        up to M.
        """
        gate = self.products["gate"](rows, self.gate, counts)
        up = self.products["up"](rows, self.up, counts)
        inside: Tensor = Gated.apply(gate, up)  # type: ignore[no-untyped-call]
        return self.products["down"](inside, self.down, counts)


class Gated(torch.autograd.Function):
    """silu(gate) * up, which keeps nothing for backward but its inputs, and makes as few new
    tensors as can be.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return a tensor like both."""
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        gate, up = ctx.saved_tensors
        of_silu = gradient * up
        torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=of_silu)
        return of_silu, F.silu(gate).mul_(gradient)


def grouped(rows: Tensor, weight: nn.Parameter, counts: Counts) -> Tensor:
    """Return x Wᵀ [M, O] for the rows x [M, I] of each expert, and its matrix W in `weight` [E, O,
    I].
    """
    return Grouped.apply(*at_autocast(rows, weight), counts)  # type: ignore[no-any-return, no-untyped-call]


class Grouped(torch.autograd.Function):
    """`grouped`, whose backward is grouped as well."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        counts: Counts,
    ) -> Tensor:
        """Return [M, O]."""
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return products(rows, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of the rows and of the weight."""
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(rows, gradient, ctx.counts)
        return products(gradient, weight, ctx.counts), of_weight, None


def products(rows: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """Return the product of each expert's rows [M, I] and its matrix, in `matrices` [E, I, O]: [M,
    O].
    """
    if has_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=_ends(counts, rows.device))
    found = rows.new_empty(len(rows), matrices.shape[2])
    for x, matrix, y in zip(
        torch.split(rows, counts), matrices, torch.split(found, counts), strict=True
    ):
        torch.mm(x, matrix, out=y)
    return found


def weight_gradient(rows: Tensor, gradient: Tensor, counts: Counts) -> Tensor:
    """Return gᵀ x [E, O, I] of each expert's rows x [M, I] and the gradients g [M, O] of their
    products.
    """
    if has_kernel(rows, gradient):
        return F.grouped_mm(gradient.mT, rows, offs=_ends(counts, rows.device))
    found = rows.new_empty(len(counts), gradient.shape[1], rows.shape[1])
    for x, g, of_expert in zip(
        torch.split(rows, counts), torch.split(gradient, counts), found, strict=True
    ):
        torch.mm(g.T, x, out=of_expert)  # zeros for no rows
    return found


def add_weight_gradient(
    total: Tensor,
    rows: Tensor,
    gradient: Tensor,
    counts: Counts,
) -> None:
    """Add gᵀ x of each expert to `total` [E, O, I], by the product itself."""
    for x, g, of_expert in zip(
        torch.split(rows, counts), torch.split(gradient, counts), total, strict=True
    ):
        of_expert.addmm_(g.T, x)


def has_kernel(rows: Tensor, others: Tensor) -> bool:
    """Tell whether torch's grouped kernel takes these: bfloat16, and sizes that are multiples of 16
    bytes.
    """
    sizes = (*rows.shape[1:], *others.shape[1:])
    return (
        rows.device.type in KERNEL_DEVICES
        and rows.dtype == torch.bfloat16
        and not any(size % 8 for size in sizes)
    )


def _ends(counts: Counts, device: torch.device) -> Tensor:
    """Return where each expert's rows end."""
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)
