"""What the engines (MPI, gloo, NCCL) can be asked to reduce: checked here, before they are called.

An engine that learns of a wrong request from itself has often begun, and the other ranks wait. None
of them is asked for a mean: the collectives ask for a sum, and divide.
"""

from typing import Protocol

from minidist.full.comm.buffers import Array, dtype_name


class Operation(Protocol):
    """A reduction of the collectives, of which an engine takes the name: any but mean."""

    op: str


def check_reducible(engine: str, array: Array, unknown: tuple[str, ...]) -> None:
    """Raise TypeError if the array is of a dtype that is `unknown` to the engine's reductions."""
    if dtype_name(array) in unknown:
        fix = (
            "choose another algorithm than 'native' (which 'auto' takes on GPUs), or convert to "
            "float32 or int32"
        )
        raise TypeError(f"{engine} cannot reduce {dtype_name(array)}: {fix}")
