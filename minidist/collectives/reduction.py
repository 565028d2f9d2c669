"""Element by element: the operations that collectives reduce with.

A reduction is called as `combine(a, b, out)`, on flat arrays of equal length; `out` may be `a` or `b`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from minidist.comm.buffers import FLOATS, device_name, dtype_name

if TYPE_CHECKING:
    from minidist.comm.buffers import Array

Combine: TypeAlias = Callable[[Any, Any, Any], Any]

OPERATIONS = ("sum", "mean", "max", "min", "prod")
NUMPY: dict[str, Combine] = {
    "sum": np.add,
    "mean": np.add,
    "max": lambda a, b, out: np.maximum(a, b, out=out),  # numpy deprecates their third positional argument
    "min": lambda a, b, out: np.minimum(a, b, out=out),
    "prod": np.multiply,
}
TORCH = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "mul"}


def reduction(op: str, array: Array) -> Combine:
    """Return `combine(a, b, out)` for arrays like `array`.

    A mean is a sum that `finish` divides once, at the end.

    Raises
    ------
    ValueError
        If `op` is not one of sum, mean, max, min, prod.
    TypeError
        If it is the mean of integers, which is not an integer.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op={op!r} is not a reduction: choose one of {', '.join(OPERATIONS)}")
    if op == "mean" and dtype_name(array) not in FLOATS:
        raise TypeError(f"the mean of {dtype_name(array)} is not {dtype_name(array)}: use op='sum' and divide yourself")
    if isinstance(array, np.ndarray):
        return NUMPY[op]
    if device_name(array) == "meta":
        return lambda a, b, out: out
    function = getattr(sys.modules["torch"], TORCH[op])
    return lambda a, b, out: function(a, b, out=out)


def finish(op: str, array: Array, ranks: int) -> None:
    """Turn the complete sum into the mean, if that was asked for. The same division on every rank: the same bits."""
    if op == "mean" and device_name(array) != "meta":
        array /= ranks
