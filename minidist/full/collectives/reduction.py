"""Reductions: the operations by which collectives combine arrays, element by element.

Collectives call `combine(a, b, out)` on flat arrays of equal length; `out` may be `a` or `b`.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from minidist.full.comm.buffers import FLOATS, Array, device_name, dtype_name

Combine: TypeAlias = Callable[[Any, Any, Any], object]
"""Writes the reduction of two arrays, element by element, to the third; what it returns does not
matter.
"""

BITWISE = ("and", "or", "xor")
REDUCTIONS = ("sum", "mean", "max", "min", "prod", *BITWISE)


class Reduction(partial[Any]):
    """A `Combine` that is as fast as the function itself; `op` is its name for the native
    engines.
    """

    op: str


def named(op: str, function: Callable[..., Any]) -> Reduction:
    """Return a function as the reduction `op`."""
    combine = Reduction(function)
    combine.op = op
    return combine


NUMPY = {
    "sum": named("sum", np.add),
    # numpy deprecates a third positional argument
    "max": named("max", lambda a, b, out: np.maximum(a, b, out=out)),
    "min": named("min", lambda a, b, out: np.minimum(a, b, out=out)),
    "prod": named("prod", np.multiply),
    "and": named("and", np.bitwise_and),
    "or": named("or", np.bitwise_or),
    "xor": named("xor", np.bitwise_xor),
}
TORCH = {
    "sum": "add",
    "max": "maximum",
    "min": "minimum",
    "prod": "mul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}


def reduction(op: str, array: Array) -> Reduction:
    """Return `combine(a, b, out)` for arrays like `array`. For a mean it adds; `finish` divides
    once, at the end.

    Raises
    ------
    ValueError
        If `op` is not one of `REDUCTIONS`.
    TypeError
        For the mean of integers, which is not an integer, for the bits of floats, and for integers
        that torch cannot compute with.
    """
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} is not a reduction: choose one of {', '.join(REDUCTIONS)}")
    if op == "mean" and dtype_name(array) not in FLOATS:
        raise TypeError(
            f"the mean of {dtype_name(array)} is not {dtype_name(array)}: use op='sum' and divide "
            "yourself"
        )
    if op in BITWISE and dtype_name(array) in FLOATS:
        raise TypeError(
            f"op={op!r} joins bits, and those of {dtype_name(array)} are no numbers one by one: use "
            "integers or bool"
        )
    op = "sum" if op == "mean" else op
    if isinstance(array, np.ndarray):
        return NUMPY[op]
    if device_name(array) == "meta":
        return named(op, lambda a, b, out: out)
    if dtype_name(array) in ("uint16", "uint32", "uint64"):
        raise TypeError(
            f"torch cannot compute with {dtype_name(array)} on a GPU: convert to int32 or int64"
        )
    function = getattr(sys.modules["torch"], TORCH[op])
    return named(op, lambda a, b, out: function(a, b, out=out))


def finish(op: str, array: Array, ranks: int) -> None:
    """Turn the complete sum into the mean if `op` is "mean". Every rank divides, and gets the same
    bits.
    """
    if op == "mean" and device_name(array) != "meta":
        array /= ranks
