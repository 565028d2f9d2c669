"""LoRA: train a product of two thin matrices beside a weight that stays as it is.

    x [.., D_in] ─┬─▶ base W, frozen ──────────────────────────────┬─ + ─▶ y [.., D_out]
                  └─▶ dropout ─▶ A [r, D_in] ─▶ B [D_out, r] · α/r ┘

B starts at zero, so the model starts unchanged. Trained are r (D_in + D_out) numbers instead of D_in D_out; gradients,
optimizer state and what data parallelism sends shrink by the same ratio. Once trained, W + α/r BA is one matrix again:
using the model costs nothing more. (Hu et al. 2021, LoRA, section 4.)

QLoRA keeps W in four bits (`nf4`). Forward and backward each dequantise the one matrix they need and drop it again.
(Dettmers et al. 2023, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.memory.adapters.nf4 import NF4Tensor, dequantize, quantize
from minidist.model import Where
from minidist.model.dropout import dropout_mask

EVERY_MATRIX = ("query", "key", "value", "output", "gate", "up", "down")
FIRST_SITE = 1 << 32  # dropout sites of adapters, far from those of the model


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ("query", "value"),
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> None:
    """Put adapters beside linear layers and freeze all else.

    Parameters
    ----------
    model : nn.Module
        Changed in place: every layer that a target names becomes a `LoRALinear` around it.
    rank, alpha
        The adapter is a matrix of that rank, scaled by alpha/rank.
    targets : sequence of str
        Patterns as the shell's, for a layer's last name (`query`) or full name (`layers.0.*`).
    dropout : float
        Probability that an input of an adapter is zeroed in training. The mask is a pure function of `Where`, as in the
        model (see `model.dropout`), so some module above the adapter has to be called with one.
    generator : torch.Generator, optional
        Draws the A matrices, on the CPU; without one, a generator with seed 0.

    Raises
    ------
    ValueError
        If a target matches nothing, the model has adapters already, or a number is out of range. Nothing has been
        changed then.
    """
    _add(model, rank, alpha, targets, dropout, generator, lambda linear: linear)


def add_qlora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = EVERY_MATRIX,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> None:
    """Do as `add_lora`, and keep the layers that get adapters in NF4."""
    _add(model, rank, alpha, targets, dropout, generator, QuantizedLinear)


def merge(model: nn.Module) -> None:
    """Fold every adapter into its layer, which becomes a plain, still frozen `nn.Linear` of the same name.

    A head that was tied to the embedding has its own matrix from then on; the embedding stays as it was.
    """
    _replace(model, {module: module.merged() for module in model.modules() if isinstance(module, LoRALinear)})


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return all that was trained; `model.load_state_dict(..., strict=False)` puts it back."""
    return {
        f"{path}.{name}": parameter.detach()
        for path, module in model.named_modules()
        if isinstance(module, LoRALinear)
        for name, parameter in (("A", module.A), ("B", module.B))
    }


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight lies in NF4."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape, self.bias = linear.weight.shape, linear.bias
        packed = quantize(linear.weight)
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)
        # As bytes, because model.to(torch.bfloat16) would round what looks like a number.
        self.register_buffer("steps", packed.steps.view(torch.uint8))
        self.register_buffer("mean", packed.mean.view(torch.uint8))

    @property
    def packed(self) -> NF4Tensor:
        """The weight [D_out, D_in]."""
        steps, mean = self.get_buffer("steps"), self.get_buffer("mean")
        numbers = steps.view(torch.float32), mean.view(torch.float32)
        return NF4Tensor(self.get_buffer("codes"), self.get_buffer("scales"), *numbers, self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim of `x`."""
        y: Tensor = _QuantizedProduct.apply(x, self.packed)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class _QuantizedProduct(torch.autograd.Function):
    """x Wᵀ for a W in NF4; what autograd keeps of it is the codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: NF4Tensor) -> Tensor:
        ctx.packed = packed
        return F.linear(x, dequantize(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantize(ctx.packed, grad.dtype), None


Base: TypeAlias = nn.Linear | QuantizedLinear


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: Base, weight: Tensor, rank: int, alpha: float, dropout: float, site: int) -> None:
        super().__init__()
        self.base, self.scale, self.rate, self.site = base, alpha / rank, dropout, site
        self.where: Where | None = None  # of the forward pass that goes on
        self.A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim of `x`, [B, T, D_in] if there is dropout."""
        y: Tensor = self.base(x)
        if self.training and self.rate > 0:
            if self.where is None:
                raise RuntimeError(
                    "dropout in adapters draws its mask from a Where: pass one to the model, or dropout=0"
                )
            dropped = dropout_mask(x.shape, self.rate, self.site, self.where, x.device)
            x = x.masked_fill(dropped, 0) * (1 / (1 - self.rate))
        return y + F.linear(F.linear(x, self.A), self.B) * self.scale

    def merged(self) -> nn.Linear:
        """Return the one linear layer that computes the same."""
        base = self.base
        weight = dequantize(base.packed, self.A.dtype) if isinstance(base, QuantizedLinear) else base.weight.detach()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight + self.B.detach() @ self.A.detach() * self.scale, requires_grad=False)
        linear.bias = base.bias
        return linear.train(self.training)


def _add(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    dropout: float,
    generator: torch.Generator | None,
    prepare: Callable[[nn.Linear], Base],
) -> None:
    if rank < 1 or not 0 <= dropout < 1:
        raise ValueError(f"rank={rank}, dropout={dropout}: the rank is at least 1, and dropout lies in [0, 1)")
    chosen = _choose(model, targets)
    generator = generator or torch.Generator().manual_seed(0)
    model.requires_grad_(False)
    adapters: dict[nn.Module, nn.Module] = {}
    for site, linear in enumerate(chosen, FIRST_SITE):
        adapter = LoRALinear(prepare(linear), linear.weight, rank, alpha, dropout, site).train(linear.training)
        with torch.no_grad():  # drawn in float32 on the CPU: the same numbers for every dtype and device
            adapter.A.copy_(torch.randn(adapter.A.shape, generator=generator) / linear.in_features**0.5)
        adapters[linear] = adapter
    _replace(model, adapters)
    if dropout > 0:
        for module in model.modules():
            if any(isinstance(part, LoRALinear) for part in module.modules()) and not isinstance(module, LoRALinear):
                module.register_forward_pre_hook(_tell_where, with_kwargs=True)


def _choose(model: nn.Module, targets: Sequence[str]) -> list[nn.Linear]:
    """Return the linear layers that the targets name, in the model's order."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("the model has adapters already: merge(model) first, or name all targets at once")
    linears = {name: module for name, module in model.named_modules() if name and type(module) is nn.Linear}
    chosen: set[str] = set()
    for target in targets:
        matched = {name for name in linears if fnmatch(name, target) or fnmatch(name.rpartition(".")[2], target)}
        if not matched:
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears)) or "none"
            raise ValueError(f"targets: no linear layer is called {target!r}; the model's are called {there}")
        chosen |= matched
    return [module for name, module in linears.items() if name in chosen]


def _replace(model: nn.Module, substitutes: dict[nn.Module, nn.Module]) -> None:
    """Put each substitute wherever the original stands; a layer that is shared stays shared."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in substitutes:
                setattr(parent, name, substitutes[child])


def _tell_where(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before `module` runs with a `Where`, also for a recomputation, hand that to the adapters inside."""
    for where in (*args, *kwargs.values()):
        if isinstance(where, Where):
            for part in module.modules():
                if isinstance(part, LoRALinear):
                    part.where = where
