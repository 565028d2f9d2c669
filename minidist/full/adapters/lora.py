"""LoRA: train a product of two thin matrices beside a weight that stays as it is.

    x [.., D_in] ─┬─▶ base W, frozen ───────────────────┬─ + ─▶ y [.., D_out]
                  └─▶ A [r, D_in] ─▶ B [D_out, r] · α/r ┘

B starts at zero, so the model starts unchanged. An adapter trains r (D_in + D_out) numbers instead
of D_in D_out. Gradients, optimizer state and the bytes that data parallelism sends shrink by the
same ratio. After training, W + α/r BA is one matrix again, so the merged model costs no more than
the original. (Hu et al. 2021, LoRA, section 4.)

W may be `Stored` in another form than as a matrix. Its parts are then frozen parameters, which
strategies share out and never send as gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.memory.hooks import check_unwrapped

EVERY_MATRIX = ("query", "key", "value", "output", "gate", "up", "down")


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ("query", "value"),
    generator: torch.Generator | None = None,
    store: Callable[[nn.Linear], Base] = lambda linear: linear,
) -> None:
    """Put adapters beside linear layers and freeze all other parameters.

    Parameters
    ----------
    model : nn.Module
        Changed in place: a `LoRALinear` replaces every layer that a target names, and contains it.
    rank, alpha
        The adapter is a matrix of that rank, scaled by alpha/rank.
    targets : sequence of str
        Shell patterns for a layer's last name (`query`) or full name (`layers.0.*`).
    generator : torch.Generator, optional
        Draws the A matrices, on the CPU; without one, a generator with seed 0.
    store : callable, optional
        Returns what replaces the frozen layer, a `Stored`; by default the layer itself.

    Raises
    ------
    ValueError
        If a target matches no layer, the model already has adapters, or `rank` is below 1; or if
        tensor parallelism, products in 8 bits, DDP, ZeRO or FSDP came first. The model is then
        unchanged.

    After training, `{name: p for name, p in model.named_parameters() if p.requires_grad}` holds the
    adapters alone; `model.load_state_dict(..., strict=False)` loads them.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} is not the rank of an adapter: use at least 1")
    check_unwrapped(model, "add_lora")
    chosen = _choose(model, targets)
    generator = generator or torch.Generator().manual_seed(0)
    model.requires_grad_(False)
    adapters: dict[nn.Module, nn.Module] = {}
    for linear in chosen:
        adapter = LoRALinear(store(linear), linear.weight, rank, alpha).train(linear.training)
        # drawn in float32 on the CPU: the same numbers for every dtype and device
        with torch.no_grad():
            adapter.A.copy_(
                torch.randn(adapter.A.shape, generator=generator) / linear.in_features**0.5
            )
        adapters[linear] = adapter
    _replace(model, adapters)


def merge(model: nn.Module) -> None:
    """Fold every adapter into its layer, which becomes a plain, still frozen `nn.Linear` of the
    same name.

    A head that was tied to the embedding gets its own matrix; the embedding does not change.
    """
    _replace(
        model,
        {module: module.merged() for module in model.modules() if isinstance(module, LoRALinear)},
    )


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter.

    Parameters
    ----------
    base : nn.Linear or Stored
        The frozen layer.
    weight : Tensor
        The layer's weight [D_out, D_in] before it was stored; the adapter takes its shape, dtype and
        device.
    rank, alpha
        As for `add_lora`.
    """

    def __init__(self, base: Base, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        # of A x: a sum, where several ranks have parts of x
        self.join: Callable[[Tensor], Tensor] = unchanged
        self.A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dim of `x` [.., D_in] to D_out channels."""
        y: Tensor = self.base(x)
        return y + F.linear(self.join(F.linear(x, self.A)), self.B) * self.scale

    @property
    def weight(self) -> Tensor:
        """The frozen weight [D_out, D_in], as models read it that ask for its dtype."""
        base = self.base
        return base.weight_in(self.A.dtype) if isinstance(base, Stored) else base.weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias [D_out], if it has one."""
        return self.base.bias

    def merged(self) -> nn.Linear:
        """Return the one linear layer that computes the same."""
        base, weight = self.base, self.weight.detach()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(
            weight + self.B.detach() @ self.A.detach() * self.scale, requires_grad=False
        )
        linear.bias = base.bias
        return linear.train(self.training)


def unchanged(x: Tensor) -> Tensor:
    """Return `x`. (It has a name, as a model with a lambda in it could not be pickled.)"""
    return x


class Stored(nn.Module):
    """A frozen linear layer that keeps its weight in another form than as a matrix.

    Attributes
    ----------
    bias : Tensor or None
    in_features, out_features : int
    """

    left_alone: ClassVar[tuple[str, ...]] = ()
    """Modules that a compiler does not look into."""

    bias: nn.Parameter  # or None, as of `nn.Linear`
    in_features: int
    out_features: int

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [D_out, D_in], which is made each time."""
        raise NotImplementedError


Base: TypeAlias = nn.Linear | Stored


def linear_in(module: Any) -> Any:
    """Return the linear layer itself, or the frozen one beside its adapter."""
    return module.base if isinstance(module, LoRALinear) else module


def _choose(model: nn.Module, targets: Sequence[str]) -> list[nn.Linear]:
    """Return the linear layers that the targets name, in the model's order."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError(
            "the model has adapters already: merge(model) first, or name all targets at once"
        )
    linears = {
        name: module for name, module in model.named_modules() if name and type(module) is nn.Linear
    }
    chosen: set[str] = set()
    for target in targets:
        matched = {
            name
            for name in linears
            if fnmatch(name, target) or fnmatch(name.rpartition(".")[2], target)
        }
        if not matched:
            _check_order(model, target)
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears)) or "none"
            raise ValueError(
                f"targets: no linear layer is called {target!r}; the model's are called {there}"
            )
        chosen |= matched
    return [module for name, module in linears.items() if name in chosen]


def _check_order(model: nn.Module, target: str) -> None:
    """Raise ValueError if another strategy has replaced a layer that a target names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            fnmatch(name, target) or fnmatch(name.rpartition(".")[2], target)
        ):
            fault = (
                f"{name} is a {type(module).__name__} already, beside which an adapter would not "
                "be cut or rounded"
            )
            raise ValueError(f"{fault}: add_lora comes before tensor parallelism and before to_fp8")


def _replace(model: nn.Module, substitutes: dict[nn.Module, nn.Module]) -> None:
    """Put each substitute in every place of the original, so a shared layer stays shared."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and module in substitutes:
            model.set_submodule(name, substitutes[module])
