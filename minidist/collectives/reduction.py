"""Reductions: the operations by which collectives combine arrays, element by element.

Collectives call `combine(a, b, out)` on flat arrays of equal length; `out` may be `a` or `b`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import numpy as np

from minidist.comm.buffers import FLOATS, device_name, dtype_name

if TYPE_CHECKING:
    from minidist.comm.buffers import Array


class Combine(Protocol):
    """A reduction of two arrays."""

    def __call__(self, a: Array, b: Array, out: Array, /) -> object:
        """Write the reduction of `a` and `b`, element by element, to `out`; return anything."""


REDUCTIONS = ("sum", "mean", "max", "min", "prod")
NUMPY: dict[str, Combine] = {
    "sum": np.add,
    "max": lambda a, b, out: np.maximum(a, b, out=out),  # numpy deprecates their third positional argument
    "min": lambda a, b, out: np.minimum(a, b, out=out),
    "prod": np.multiply,
}
TORCH = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul"}


def reduction(op: str, array: Array) -> Combine:
    """Return `combine(a, b, out)` for arrays like `array`.

    Raises
    ------
    ValueError
        If `op` is not one of sum, mean, max, min, prod.
    TypeError
        For the mean of integers, which is not an integer, and for integers that torch cannot compute with.
    """
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} is not a reduction: choose one of {', '.join(REDUCTIONS)}")
    if op == "mean" and dtype_name(array) not in FLOATS:
        raise TypeError(f"the mean of {dtype_name(array)} is not {dtype_name(array)}: use op='sum' and divide yourself")
    if isinstance(array, np.ndarray):
        return NUMPY[accumulated(op)]
    if device_name(array) == "meta":
        return lambda a, b, out: out
    if dtype_name(array) in ("uint16", "uint32", "uint64"):
        raise TypeError(f"torch cannot compute with {dtype_name(array)} on a GPU: convert to int32 or int64")
    function = getattr(sys.modules["torch"], TORCH[accumulated(op)])
    return lambda a, b, out: function(a, b, out=out)


def accumulated(op: str) -> str:
    """Return the operation between two ranks: a mean is a sum, which `finish` divides once, at the end."""
    return "sum" if op == "mean" else op


def finish(op: str, array: Array, ranks: int) -> None:
    """Turn the complete sum into the mean if `op` is "mean". Every rank divides, and gets the same bits."""
    if op == "mean" and device_name(array) != "meta":
        array /= ranks
