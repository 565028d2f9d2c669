"""What MPI is given of a buffer: its bytes, which have to lie in the CPU's memory."""

from typing import Any

from minidist.full.comm.buffers import Array, as_bytes, device_name


def check_on_cpu(array: Array) -> None:
    """Raise ValueError for memory of a GPU, and for a tensor on `meta`, which has none."""
    if device_name(array) != "cpu":
        fix = "use .cpu(), or torchrun"
        if device_name(array) == "meta":
            fix = "only simulated ranks send what has no memory: use minidist.run"
        raise ValueError(f"the mpi wire carries CPU buffers, not {device_name(array)}: {fix}")


def bytes_of(array: Array) -> Any:
    """Return a flat CPU array as bytes, sharing memory."""
    check_on_cpu(array)
    return as_bytes(array)
