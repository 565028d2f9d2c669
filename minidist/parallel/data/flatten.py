"""Tensors laid end to end in one flat tensor, and back: what one message carries.

weight [2, 3] │ bias [2]      tensors of any shape
├─────────┼──────┤            one flat tensor; each of them is a view into it
"""

import ctypes

import torch
from torch import Tensor, nn

from minidist.comm import Communicator


def flat_buffer(parameters: list[nn.Parameter], comm: Communicator) -> Tensor:
    """Return a flat tensor of zeros in registered memory that has room for all `parameters`.
    Collective.
    """
    size, like = sum(parameter.numel() for parameter in parameters), parameters[0]
    registered = (
        comm.allocate(size, like.dtype) if like.device.type != "meta" else like.new_empty(size)
    )
    return registered.to(like.device)  # type: ignore[union-attr]


def views_into(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the part of `flat` that belongs to each parameter, in its shape."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def take_gradients(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> Tensor:
    """Move the gradients into one new flat tensor of a dtype, and free them. A missing gradient
    counts as zero.
    """
    gradients = [
        p.new_zeros(p.numel()) if p._grad is None else p._grad.flatten() for p in parameters
    ]
    flat = parameters[0].new_empty(sum(map(len, gradients)), dtype=dtype)
    for parameter in parameters:
        parameter._grad = None
    return torch.cat(gradients, out=flat)


def make_room(whole: Tensor) -> Tensor:
    """Give memory back to a tensor whose storage was resized to 0 bytes; return a flat tensor
    through which to write.

    On a CPU that is another tensor on the same memory: torch no longer resizes a storage that numpy
    has seen.
    """
    if not whole.untyped_storage().nbytes():
        whole.untyped_storage().resize_(whole.nbytes)
    if whole.device.type != "cpu" or not whole.nbytes:
        return whole
    return torch.frombuffer(
        (ctypes.c_byte * whole.nbytes).from_address(whole.data_ptr()), dtype=whole.dtype
    )
