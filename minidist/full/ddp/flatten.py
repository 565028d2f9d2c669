"""Tensors laid end to end in one flat tensor, and back: what one message carries.

weight [2, 3] │ bias [2]      tensors of any shape
├─────────┼──────┤            one flat tensor; each of them is a view into it
"""

from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.comm import Communicator


def flat_buffer(parameters: list[nn.Parameter], comm: Communicator) -> Tensor:
    """Return a flat tensor of zeros in registered memory that has room for all `parameters`.

    Collective.
    """
    size = sum(parameter.numel() for parameter in parameters)
    like = parameters[0]
    if like.device.type == "meta":
        return like.new_empty(size)
    registered: Any = comm.allocate(size, like.dtype)
    allocated: Tensor = registered.to(like.device)
    return allocated


def views_into(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the part of `flat` that belongs to each parameter, in its shape."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)
    ]


def take_gradients(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> Tensor:
    """Move the gradients into one new flat tensor of a dtype, and free them.

    A missing gradient counts as zero.
    """
    gradients = []
    for parameter in parameters:
        gradient = parameter._grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradients.append(gradient.flatten().as_subclass(Tensor))
        parameter._grad = None
    flat = parameters[0].new_empty(sum(map(len, gradients)), dtype=dtype)
    return torch.cat(gradients, out=flat)


def make_room(whole: Tensor) -> Tensor:
    """Give memory back to a tensor whose storage was resized to 0 bytes, and return it."""
    storage = whole.untyped_storage()
    if not storage.nbytes():
        storage.resize_(whole.nbytes)
    return whole
