"""Float8 matrix products: operands have 8 bits, and one scale a tensor moves them into the range of
the format.

    format   bits (sign exponent mantissa)   largest   smallest     for
    E4M3     1 4 3                           448       2^-9         inputs and weights: precise
    E5M2     1 5 2                           57344     2^-16        gradients of outputs: they spread wider

    forward    output = input · weightᵀ           E4M3 · E4M3     every operand is x8 = cast(x * scale), and the product
    backward   d_input = d_output · weight        E5M2 · E4M3     is divided by both scales; sums are float32
               d_weight = d_outputᵀ · input       E5M2 · E4M3

A scale moves the largest magnitude of a tensor (its *amax*) to the upper end of the format. Finding
the amax before the cast takes a second pass over the tensor, and a message if the tensor is spread
over ranks. *Delayed* scaling avoids both: it uses the largest amax of the last steps, and
`update_scales` reduces the amaxes of the whole model in one all-reduce a step. A tensor that
outgrows its past saturates at the format's largest number for one step. Scales are powers of two.
Multiplying by them rounds nothing, so an element within range is off by at most half a step of the
format.

Backward keeps the input in 8 bits, a quarter of float32. A GPU of the Hopper generation multiplies
float8 twice as fast as 16 bits. Elsewhere float32 emulates the product: the same numbers, no speed.
(Micikevicius et al. 2022, "FP8 formats for deep learning"; delayed scaling as in NVIDIA's
Transformer Engine.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.precision.mixed import supports

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def to_fp8(model: nn.Module, history: int = 16, skip: tuple[str, ...] = ("head",)) -> list[str]:
    """Replace the linear layers of a model by `Float8Linear` with the same parameters; return their
    names.

    Layers that tensor parallelism has cut stay, and get another product. Experts are no linear
    layers: `experts_to_fp8` is for them.

    Parameters
    ----------
    model : nn.Module
        Already on its device. Parameters keep their names and dtype; the optimizer updates them as
        before.
    history : int
        Number of steps whose amaxes decide the scale.
    skip : tuple of str
        Parts of names to leave alone: `head`, whose errors go straight into the loss, or `layers.0`
        and all inside.

    Raises
    ------
    ValueError
        If `history` is below 1, or there is no linear layer to replace.
    """
    if history < 1:
        raise ValueError(f"{history=}: scales go by the amaxes of at least 1 step")
    replaced: dict[nn.Module, Float8Linear] = {}
    names = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not name or any(f".{part}." in f".{name}." for part in skip):
            continue
        if isinstance(module, nn.Linear) and hasattr(module, "product"):
            # it is cut over ranks, and does more than multiply
            module.add_module("in_fp8", Float8Multiply(history, module.weight.device))
            module.product = partial(module.get_submodule("in_fp8"), weight=module.weight)  # type: ignore[assignment]
            names.append(name)
        elif type(module) is nn.Linear:
            # once, if shared
            model.set_submodule(name, replaced.setdefault(module, Float8Linear(module, history)))
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear but those in {skip=}: nothing to do in float8"
        )
    return names


def update_scales(model: nn.Module, *comms: Communicator) -> None:
    """Enter the amaxes of this step into the scales of the next. Collective; call it once a step,
    after backward.

    Parameters
    ----------
    model : nn.Module
        The model that `to_fp8` changed.
    comms : Communicator
        The axes whose ranks hold parts of the same tensors: of the batch, the sequence, or the
        layer itself. Each axis costs one all-reduce of 12 bytes a layer.
    """
    scales = scales_of(model)
    if not scales:
        return
    amaxes = torch.cat([scale.amax.view(-1) for scale in scales])
    amaxes = torch.where(amaxes.isfinite(), amaxes, 0)  # an overflow says nothing about later sizes
    for comm in comms:
        all_reduce(amaxes, comm, op="max")
    counts = [scale.amax.numel() for scale in scales]
    for scale, amax in zip(scales, torch.split(amaxes, counts), strict=True):
        scale.remember(amax.view_as(scale.amax))


def scales_of(model: nn.Module) -> list[DelayedScale]:
    """Return the scales of all float8 layers: of input, weight, and the output's gradient, layer by
    layer.

    A run continues bit for bit from a checkpoint that holds the `history` of each.
    """
    return [
        scale
        for module in model.modules()
        if isinstance(module, Float8Multiply)
        for scale in module.scales
    ]


class Float8Multiply(nn.Module):
    """A product in float8, without parameters: it has the scales of its three operands.

    Attributes
    ----------
    histories : Tensor
        The histories of the three operands [3, history], which a checkpoint keeps. Each scale
        writes to its row.
    """

    def __init__(self, history: int, device: torch.device, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.scales = tuple(
            DelayedScale(dtype, history, device, shape) for dtype in (E4M3, E4M3, E5M2)
        )
        self.histories = torch.zeros(3, *shape, history, device=device)
        self._link()

    def _link(self) -> None:
        for scale, row in zip(self.scales, self.histories, strict=True):
            scale.history = row

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let scales write to their rows again: a pickled view is a tensor of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x weightᵀ in the dtype of `x` [..., D]. Scales learn their amaxes in training
        only.
        """
        product: Tensor = Float8Product.apply(  # type: ignore[no-untyped-call]
            x,
            weight,
            self.scales,
            self.training,
        )
        return product


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8. It shares the parameters of `linear`, in their own
    dtype.
    """

    def __init__(self, linear: nn.Linear, history: int = 16) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self.in_fp8 = Float8Multiply(history, linear.weight.device)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return x weightᵀ + bias in the dtype of `x` [..., D]."""
        product: Tensor = self.in_fp8(x, self.weight)
        return product if self.bias is None else product + self.bias


class DelayedScale:
    """The scale of one tensor, derived from its largest magnitudes in the last steps.

    Attributes
    ----------
    amax : Tensor
        The largest magnitude on this rank since the last `update_scales`; a scalar, or with experts
        one for each.
    history : Tensor
        The amaxes of the last steps over all ranks [..., history], newest first; 0 where nothing is
        known.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        history: int,
        device: torch.device,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.dtype = dtype
        self.amax = torch.zeros(shape, device=device)
        self.history = torch.zeros(*shape, history, device=device)

    def cast(self, x: Tensor, learn: bool) -> tuple[Tensor, Tensor]:
        """Return `x` in float8, and its scale.

        One element that is not finite turns all of them into NaN: saturating it would hide the
        overflow.
        """
        amax = torch.zeros_like(self.amax)
        if x.numel():
            amax = torch.linalg.vector_norm(x, torch.inf).float()
        if learn:
            self.amax = torch.maximum(self.amax, amax)
        scale = self.of(self.history, amax)
        return quantize(x, self.dtype, scale), scale

    def of(self, history: Tensor, amax: Tensor) -> Tensor:
        """Return the scale of a tensor with this history [..., history] and this amax now [...]."""
        past = history.amax(-1)
        # the first step has no past
        scale = scale_for(torch.where(past > 0, past, amax), self.dtype)
        return torch.where(amax.isfinite(), scale, torch.nan)

    def remember(self, amax: Tensor) -> None:
        """Enter the amax of a step, over all ranks, into the history."""
        newest = amax.unsqueeze(-1)
        older = self.history[..., :-1]
        self.history.copy_(torch.cat((newest, older), dim=-1))
        self.amax = torch.zeros_like(self.amax)


class Float8Product(torch.autograd.Function):
    """The product x weightᵀ, and its two gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: tuple[DelayedScale, ...], learn: bool
    ) -> Tensor:
        """Multiply [..., D] by [N, D]ᵀ, and save both in float8."""
        of_x, of_weight, ctx.gradient_scale = scales
        ctx.learn = learn
        ctx.dtype = weight.dtype
        x8, x_scale = of_x.cast(x.reshape(-1, x.shape[-1]), learn)  # [M, D]
        weight8, weight_scale = of_weight.cast(weight, learn)  # [N, D]
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        product = scaled_matmul(
            x8,
            weight8.t(),
            x_scale,
            weight_scale,
            x.dtype,
        )  # [M, N]
        return product.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradient of the output, in float8 too, by the saved operands."""
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight8))
        g8, g_scale = ctx.gradient_scale.cast(rows, ctx.learn)  # [M, N]
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            flat = scaled_matmul(g8, weight8, g_scale, weight_scale, gradient.dtype)  # [M, D]
            d_x = flat.view(*gradient.shape[:-1], flat.shape[-1])
        if ctx.needs_input_grad[1]:
            d_weight = scaled_matmul(g8.t(), x8, g_scale, x_scale, ctx.dtype)  # [N, D]
        return d_x, d_weight, None, None


def scaled_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return a b / (a_scale * b_scale) of float8 `a` [M, K] and `b` [K, N], summed in float32 and
    rounded to `dtype`.

    Hopper's tensor cores read `a` along its rows, `b` along its columns, and both in pieces of 16;
    other sizes, and other devices, go through float32.
    """
    in_pieces = all(size and size % 16 == 0 for size in (*a.shape, b.shape[1]))
    if a.device.type == "cuda" and in_pieces and supports(a.dtype, a.device):
        return multiply_on_tensor_cores(a, b, a_scale, b_scale, dtype)
    return (dequantize(a, a_scale) @ dequantize(b, b_scale)).to(dtype)


def multiply_on_tensor_cores(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Call the hardware's product, which multiplies by the reciprocals of the scales. Shapes as in
    `scaled_matmul`.
    """
    rows = a.contiguous()
    columns = b.t().contiguous().t()
    product: Tensor = torch._scaled_mm(
        rows, columns, a_scale.reciprocal(), b_scale.reciprocal(), out_dtype=dtype
    )
    return product


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two that keeps `amax` within the format; a scalar, float32."""
    # 1 / 2^126 is float32's smallest normal
    ratio = (torch.finfo(dtype).max / amax).clamp(max=2.0**126)
    # the exponent alone, its mantissa cleared
    return (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """Return `x * scale` rounded to the nearest number of a float8 format, saturated at its
    largest.
    """
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def dequantize(x8: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Undo `quantize`, up to rounding: return `x8 / scale` in float32."""
    return x8.float() / scale
