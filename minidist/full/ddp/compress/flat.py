"""Gradients of a bucket as one flat tensor, for what compresses elements and not matrices."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minidist.full.replica import Remembered

HALVES = (torch.float16, torch.bfloat16)


def wide(parameters: list[nn.Parameter]) -> torch.dtype:
    """Return the dtype in which to count: float32 for 16 bits, whose sums round, and overflow."""
    dtype = parameters[0].dtype
    return torch.float32 if dtype in HALVES else dtype


def size_of(parameters: list[nn.Parameter]) -> int:
    """Return how many elements all gradients have."""
    return sum(parameter.numel() for parameter in parameters)


def joined(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all gradients, one after the other, in a new tensor."""
    parts = [gradient.view(-1) for gradient in gradients]
    flat = torch.cat(parts)
    return flat.to(dtype)


def give(flat: Tensor, gradients: list[Tensor]) -> None:
    """Put the elements of a flat tensor in the gradients' place."""
    sizes = [gradient.numel() for gradient in gradients]
    parts = torch.split(flat, sizes)
    for gradient, values in zip(gradients, parts, strict=True):
        shaped = values.view_as(gradient)
        gradient.copy_(shaped)


def overflowed(total: Tensor, gradients: list[Tensor]) -> bool:
    """Tell whether a sum of 16-bit gradients has overflowed, on some rank; if so make all gradients
    NaN, so that a loss scaler leaves the step out.
    """
    dtype = gradients[0].dtype
    if dtype not in HALVES:
        return False
    finite = total.isfinite().all()
    if finite:
        return False
    for gradient in gradients:
        gradient.fill_(torch.nan)
    return True


def by_parameter(word: str, flat: Tensor, parameters: list[nn.Parameter]) -> Iterator[Remembered]:
    """Yield what is kept of each parameter's gradient, of what is kept of all; views."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = torch.split(flat, sizes)
    for parameter, part in zip(parameters, parts, strict=True):
        yield Remembered(word, parameter, part, alike=False)
