"""Lesson 13, solved: the package's own adapters, NF4 and offloaded optimizer; see
`minidist/full/memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.adapters import lora
from minidist.full.collectives import all_reduce
from minidist.full.ddp.flatten import flat_buffer, views_into
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.further.nf4 import nf4

Packed: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"


def adapt(linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> nn.Module:
    """Put an adapter beside a layer, the only one of its model."""
    model = nn.ModuleDict({"linear": linear})
    lora.add_lora(model, rank, alpha, targets=("linear",), generator=generator)
    return model["linear"]


def merge(adapted: nn.Module) -> nn.Linear:
    """Fold the adapter into the layer."""
    model = nn.ModuleDict({"linear": adapted})
    lora.merge(model)
    merged: nn.Linear = model["linear"]  # type: ignore[assignment]
    if merged.bias is not None:
        # `lora.merge` goes on with the layer's own
        merged.bias = nn.Parameter(merged.bias.detach().clone())
    return merged


def reduce_adapters(model: nn.Module, comm: Communicator) -> None:
    """Reduce all gradients there are in one flat bucket."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = flat_buffer(trained, comm)
    views = views_into(flat, trained)
    for parameter, view in zip(trained, views, strict=True):
        view.copy_(parameter.grad)
        parameter.grad = view
    all_reduce(flat, comm, algorithm="ring")


def quantize(weights: Tensor) -> Packed:
    """Pack weights into NF4."""
    packed = nf4.quantize(weights)
    return packed.codes, packed.scales, packed.steps, packed.mean


def dequantize(packed: Packed, shape: Sequence[int]) -> Tensor:
    """Return the weights that the codes stand for."""
    return nf4.dequantize(nf4.NF4Tensor(*packed, torch.Size(shape)))


def bits_per_weight(count: int) -> float:
    """Count the bytes of so many."""
    return 8 * nf4.quantize(torch.zeros(count)).nbytes / count


class Streaming(OffloadedOptimizer):
    """The package's offloaded optimizer, with its state in the slow memory that the exercise
    gives.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], slow: Any, **options: Any) -> None:
        self.slow, self.numbers = (
            slow,
            {parameter: number for number, parameter in enumerate(parameters)},
        )
        super().__init__(parameters, torch.optim.AdamW, chunk_bytes=1, **options)

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fetch; the worker calls this one chunk ahead."""
        return self.slow.fetch(self.numbers[parameter])

    def _store(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        self.slow.keep(self.numbers[parameter], state)


def offloaded_step(
    parameters: Sequence[nn.Parameter],
    slow: Any,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Do one step, a parameter to a chunk."""
    Streaming(parameters, slow, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay).step()
