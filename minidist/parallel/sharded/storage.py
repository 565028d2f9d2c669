"""Memory that is freed and given back, while views into it, and what autograd has saved of them, stay valid."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def make_room(whole: Tensor) -> Tensor:
    """Give memory back to a tensor whose storage was resized to 0 bytes; return a flat tensor through which to write.

    On a CPU that is another tensor on the same memory: torch no longer resizes a storage that numpy has seen.
    """
    if not whole.untyped_storage().nbytes():
        whole.untyped_storage().resize_(whole.nbytes)
    if whole.device.type != "cpu" or not whole.nbytes:
        return whole
    memory = (ctypes.c_byte * whole.nbytes).from_address(whole.data_ptr())
    return torch.frombuffer(memory, dtype=whole.dtype)
