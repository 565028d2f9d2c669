"""Lesson 13 answered by hand, from the handout alone: adapters, four bits, and state that lives
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.collectives import all_reduce

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4: level i is what code i stands for."""

Packed: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""Codes, scales, steps and mean of n weights in blocks of 64, and groups of 256 blocks."""


class SlowMemory(Protocol):
    """Where the optimizer's state lives."""

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return the state of parameter `number`."""
        ...

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take back the state of parameter `number`."""
        ...


class Adapted(nn.Module):
    """A frozen linear layer, and a thin change of it that is trained."""

    def __init__(
        self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        weight = linear.weight
        drawn = torch.randn(rank, linear.in_features, generator=generator) / math.sqrt(
            linear.in_features
        )
        self.A = nn.Parameter(drawn.to(weight))
        self.B = nn.Parameter(weight.new_zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by A, then by B: no matrix of the weight's size is made."""
        return self.linear(x) + self.scale * (x @ self.A.T @ self.B.T)


def adapt(linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> nn.Module:
    """Task 1a: return a module that computes `linear(x)` and the adapter, and trains A and B
    alone.
    """
    return Adapted(linear, rank, alpha, generator)


def merge(adapted: nn.Module) -> nn.Linear:
    """Task 1b: return one plain layer that computes the same."""
    assert isinstance(adapted, Adapted)
    linear = adapted.linear
    merged = nn.Linear(
        linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
    )
    merged = merged.to(linear.weight.dtype).to_empty(device=linear.weight.device)
    with torch.no_grad():
        merged.weight.copy_(linear.weight + adapted.scale * (adapted.B @ adapted.A))
        if linear.bias is not None:
            merged.bias.copy_(linear.bias)
    return merged


def reduce_adapters(model: nn.Module, comm: Communicator) -> None:
    """Task 2: replace each gradient by its sum over all ranks, in a single ring."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return
    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    all_reduce(buffer, comm, algorithm="ring")
    sums = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))


def quantize(weights: Tensor) -> Packed:
    """Task 3a: pack float32 weights of any shape into NF4, with double quantisation."""
    flat = weights.detach().reshape(-1)
    count = len(flat)
    blocks = nn.functional.pad(flat, (0, -count % 64)).view(-1, 64)

    largest = blocks.abs().amax(dim=1)
    mean = largest.mean()
    above = largest - mean
    steps = torch.stack([group.abs().max() / 127 for group in above.split(256)])
    step = steps.repeat_interleave(256)[: len(above)]  # of each block
    scales = torch.where(step > 0, (above / step).ceil().clamp(-127, 127), 0.0)

    scale = (scales * step + mean)[:, None]
    levels = torch.tensor(LEVELS)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.where(scale == 0, 7, torch.bucketize(blocks / scale, between)).view(-1)[:count]
    high, low = nn.functional.pad(codes, (0, count % 2)).to(torch.uint8).view(-1, 2).unbind(1)
    return high << 4 | low, scales.to(torch.int8), steps, mean.view(1)


def dequantize(packed: Packed, shape: Sequence[int]) -> Tensor:
    """Task 3b: return the float32 weights that were packed, rounded."""
    codes, scales, steps, mean = packed
    count = math.prod(shape)
    scale = scales.float() * steps.repeat_interleave(256)[: len(scales)] + mean
    both = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)[:count]
    return (torch.tensor(LEVELS)[both.long()] * scale.repeat_interleave(64)[:count]).view(*shape)


def bits_per_weight(count: int) -> float:
    """Task 3c: return how many bits one of `count` weights takes on the average."""
    blocks = -(-count // 64)
    groups = -(-blocks // 256)
    return 8 * (-(-count // 2) + blocks + 4 * groups + 4) / count


def offloaded_step(
    parameters: Sequence[nn.Parameter],
    slow: SlowMemory,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Task 4: do a step of AdamW, with two states in fast memory, fetched one ahead."""
    numbers = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
    ahead = slow.fetch(numbers[0]) if numbers else {}
    for place, number in enumerate(numbers):
        state = ahead
        if place + 1 < len(numbers):
            ahead = slow.fetch(numbers[place + 1])
        _update(parameters[number], state, lr, betas, eps, weight_decay)
        slow.keep(number, state)


@torch.no_grad()
def _update(
    w: nn.Parameter,
    state: dict[str, Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Do one AdamW update of a parameter and of its state, in place."""
    assert w.grad is not None
    m, v = state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    step = int(state["step"])
    m.mul_(betas[0]).add_(w.grad, alpha=1 - betas[0])
    v.mul_(betas[1]).addcmul_(w.grad, w.grad, value=1 - betas[1])
    w.mul_(1 - lr * weight_decay)
    w.sub_(lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps))
