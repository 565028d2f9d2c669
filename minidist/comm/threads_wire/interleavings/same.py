"""Whether two interleavings gave the same: bit for bit, and a NaN is the same as itself."""

from typing import Any

import numpy as np

from minidist.comm.buffers import is_tensor


def same(one: Any, other: Any) -> bool:
    """Compare what two runs returned: numbers, arrays, tensors, and what holds them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if is_tensor(one):
        one, other = one.detach(), other.detach()
        if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
            return bool(one.is_meta and one.shape == other.shape and one.dtype == other.dtype)
        one, other = one.cpu().double().numpy(), other.cpu().double().numpy()
    if isinstance(one, np.ndarray):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return bool(one == other)
