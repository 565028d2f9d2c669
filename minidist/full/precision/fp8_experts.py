"""Experts in float8: a scale for each expert's rows, one for its matrix, and one for its gradients.

    rows, sorted by expert        r r r r │ r │ │ r r
    x8 = cast(rows * scale)       s0      │ s1│ │ s3         the scale of row r is that of its expert
    y of expert e                 x8 of e · weight8[e]ᵀ      and backward as in `fp8.py`, for each expert

Experts see different tokens, so one scale for all of them would be that of the largest. Ranks that
share experts out have the histories of *all* experts: amaxes of those that a rank lacks are 0 there,
and the maximum over the ranks, which `update_scales` takes anyway, fills them in. So scales do not
depend on who has which expert, and a checkpoint of one layout continues on another.

Routers stay as they are: what they choose would jump. Cost: 12 bytes an expert and product in the
all-reduce of amaxes. Backward keeps rows and matrices in 8 bits. (Per-tensor scaling of grouped
products: NVIDIA's Transformer Engine, `GroupedLinear`; routers in higher precision: DeepSeek-AI 2024,
V3, section 3.3.1.)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidist.full.model.moe.experts import Counts, Experts
from minidist.full.precision.fp8 import DelayedScale, Float8Multiply, quantize, scaled_matmul


def experts_to_fp8(model: nn.Module, history: int = 16) -> list[str]:
    """Let all experts of a model multiply in float8; return the names of their modules.

    Apply it where experts have been shared out. Parameters stay as they are; see `to_fp8`, which does
    this to linear layers.

    Raises
    ------
    ValueError
        If `history` is below 1.
    """
    if history < 1:
        raise ValueError(f"{history=}: scales go by the amaxes of at least 1 step")
    names = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Experts):
            continue
        names.append(name)
        for matrix in module.products:
            product = Float8Experts(history, module)
            module.add_module(f"{matrix}_in_fp8", product)
            module.products[matrix] = product
    return names


class Float8Experts(Float8Multiply):
    """A grouped product in float8. Its histories are those of all experts, [3, E, history]."""

    def __init__(self, history: int, experts: Experts) -> None:
        super().__init__(history, experts.gate.device, (experts.count,))
        self.mine = slice(experts.numbers.start, experts.numbers.stop)

    def forward(self, rows: Tensor, weight: Tensor, counts: Counts) -> Tensor:  # type: ignore[override]
        """Return x Wᵀ [M, O] for the rows x [M, I] of each expert, and its matrix W in `weight` [E,
        O, I].
        """
        product: Tensor = Float8Grouped.apply(  # type: ignore[no-untyped-call]
            rows,
            weight,
            counts,
            self,
        )
        return product

    def learned(self, scale: DelayedScale, amaxes: Tensor, learn: bool) -> Tensor:
        """Return the scales of this rank's experts, whose amaxes now are these [E]."""
        if learn:
            scale.amax[self.mine] = torch.maximum(scale.amax[self.mine], amaxes)
        return scale.of(scale.history[self.mine], amaxes)

    def cast_rows(
        self, scale: DelayedScale, rows: Tensor, counts: Counts, learn: bool
    ) -> tuple[Tensor, Tensor]:
        """Return rows [M, I] in float8, and the scale of each expert's."""
        amaxes = rows.new_zeros(len(counts), dtype=torch.float32)
        for expert, own in enumerate(torch.split(rows, counts)):
            if len(own):
                amaxes[expert] = torch.linalg.vector_norm(own, torch.inf)
        scales = self.learned(scale, amaxes, learn)
        times = torch.tensor(counts, device=rows.device)
        of_rows = scales.repeat_interleave(times, output_size=len(rows))
        return quantize(rows, scale.dtype, of_rows.unsqueeze(-1)), scales

    def cast_matrices(self, weight: Tensor, learn: bool) -> tuple[Tensor, Tensor]:
        """Return matrices [E, O, I] in float8, and their scales."""
        scale = self.scales[1]
        amaxes = torch.linalg.vector_norm(weight, torch.inf, dim=(1, 2)).float()
        scales = self.learned(scale, amaxes, learn)
        return quantize(weight, scale.dtype, scales.view(-1, 1, 1)), scales


class Float8Grouped(torch.autograd.Function):
    """The product of each expert, and its two gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Counts, product: Float8Experts
    ) -> Tensor:
        """Return [M, O], and save both operands in float8."""
        of_rows, _, _ = product.scales
        learn = product.training
        rows8, row_scales = product.cast_rows(of_rows, rows, counts, learn)
        weight8, weight_scales = product.cast_matrices(weight, learn)
        ctx.save_for_backward(rows8, row_scales, weight8, weight_scales)
        ctx.product, ctx.counts = product, counts
        ctx.learn, ctx.dtype = learn, weight.dtype
        found = rows.new_empty(len(rows), weight.shape[1])
        inputs, outputs = torch.split(rows8, counts), torch.split(found, counts)
        for expert, (x8, y) in enumerate(zip(inputs, outputs, strict=True)):
            y.copy_(
                scaled_matmul(
                    x8,
                    weight8[expert].t(),
                    row_scales[expert],
                    weight_scales[expert],
                    rows.dtype,
                )
            )
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply gradients, in float8 too, by the saved operands."""
        rows8, row_scales, weight8, weight_scales = ctx.saved_tensors
        product: Float8Experts = ctx.product
        counts: Counts = ctx.counts
        _, _, of_gradient = product.scales
        g8, g_scales = product.cast_rows(of_gradient, gradient, counts, ctx.learn)  # [M, O]
        d_rows = gradient.new_empty(rows8.shape)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight8.shape, dtype=ctx.dtype, device=gradient.device)
        gradients = torch.split(g8, counts)
        inputs = torch.split(rows8, counts)
        of_inputs = torch.split(d_rows, counts)
        for expert, count in enumerate(counts):
            if count == 0:
                continue  # the gradient of its matrix is zero
            g = gradients[expert]
            of_inputs[expert].copy_(
                scaled_matmul(
                    g,
                    weight8[expert],
                    g_scales[expert],
                    weight_scales[expert],
                    gradient.dtype,
                )
            )
            if d_weight is not None:
                d_weight[expert] = scaled_matmul(
                    g.t(),
                    inputs[expert],
                    g_scales[expert],
                    row_scales[expert],
                    ctx.dtype,
                )
        return d_rows, d_weight, None, None
