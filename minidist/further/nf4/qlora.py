"""QLoRA: adapters beside weights in four bits.

Forward and backward each dequantise the one matrix they need and drop it again. The codes are frozen
parameters of bytes. (Dettmers et al. 2023, section 3.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.adapters.lora import EVERY_MATRIX, Stored, add_lora
from minidist.further.nf4 import nf4
from minidist.further.nf4.nf4 import NF4Tensor, dequantize, quantize


def add_qlora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = EVERY_MATRIX,
    generator: torch.Generator | None = None,
) -> None:
    """Do as `add_lora`, and store the layers that get adapters in NF4."""
    add_lora(model, rank, alpha, targets, generator, QuantizedLinear)


class QuantizedLinear(Stored):
    """A frozen linear layer whose weight is stored in NF4."""

    left_alone = (nf4.__name__,)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape, self.bias = linear.weight.shape, linear.bias
        self.out_features, self.in_features = self.shape
        packed = quantize(linear.weight)
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        # Stored as bytes: model.to(torch.bfloat16) would round floating point numbers.
        self.steps = nn.Parameter(packed.steps.view(torch.uint8), requires_grad=False)
        self.mean = nn.Parameter(packed.mean.view(torch.uint8), requires_grad=False)

    @property
    def packed(self) -> NF4Tensor:
        """The weight [D_out, D_in]."""
        # copies, as memory has to be aligned to be read as other numbers
        steps = self.steps.detach().clone()
        mean = self.mean.detach().clone()
        return NF4Tensor(
            self.codes.detach(),
            self.scales.detach(),
            steps.view(torch.float32),
            mean.view(torch.float32),
            self.shape,
        )

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [D_out, D_in], which is made each time."""
        return dequantize(self.packed, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim of `x` [.., D_in] to D_out channels."""
        y: Tensor = _QuantizedProduct.apply(x, self.packed)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class _QuantizedProduct(torch.autograd.Function):
    """x Wᵀ for a W in NF4. Autograd keeps the codes, not the dequantised matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: NF4Tensor) -> Tensor:
        ctx.packed = packed
        return F.linear(x, dequantize(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantize(ctx.packed, grad.dtype), None
