"""What the engines (MPI, gloo, NCCL) can be asked to reduce: checked here, before they are called.

An engine that learns of a wrong request from itself has often begun, and the other ranks wait. None of them is asked
for a mean: the collectives ask for a sum, and divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from minidist.comm.buffers import dtype_name

if TYPE_CHECKING:
    from minidist.comm.buffers import Array

Operation = TypeVar("Operation")


def known_operation(
    engine: str, op: str, array: Array, operations: Mapping[str, Operation], unknown: tuple[str, ...]
) -> Operation:
    """Return the engine's own name for `op`.

    Raises
    ------
    ValueError
        If the engine has no such operation.
    TypeError
        If it does not reduce the array's dtype.
    """
    if op not in operations:
        raise ValueError(f"{engine} cannot reduce by op={op!r}: choose one of {', '.join(operations)}")
    if dtype_name(array) in unknown:
        raise TypeError(
            f"{engine} cannot reduce {dtype_name(array)}: choose another algorithm than 'native' (which 'auto' takes "
            "on GPUs), or convert to float32 or int32"
        )
    return operations[op]
