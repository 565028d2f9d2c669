"""Memory that comes and goes while views into it, and what autograd saved of them, stay what they are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def make_room(whole: Tensor) -> Tensor:
    """Give back its bytes to a tensor whose storage has none; return a tensor to write them with.

    On a CPU it is another tensor on the same memory: once numpy has seen a storage, torch no longer resizes it.
    """
    if not whole.untyped_storage().nbytes():
        whole.untyped_storage().resize_(whole.nbytes)
    if whole.device.type != "cpu" or not whole.nbytes:
        return whole
    memory = (ctypes.c_byte * whole.nbytes).from_address(whole.data_ptr())
    return torch.frombuffer(memory, dtype=whole.dtype)
