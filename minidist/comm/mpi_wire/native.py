"""The engines' own collectives, to compare with. What they send is their secret: `traffic` has it by formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from minidist.comm.buffers import as_bytes
from minidist.comm.engine.operation import known_operation

if TYPE_CHECKING:
    from minidist.comm.buffers import Array

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
UNKNOWN = ("float16", "bfloat16", "bool")  # it has no type of the first two, and no sum or maximum of truth values


class NativeMpi:
    """MPI's collectives on flat arrays. `counts` are the elements of each rank's shard.

    What is not reduced travels as bytes, of whatever dtype.
    """

    def __init__(self, mpi: MPI.Intracomm):
        self.mpi, self.rank = mpi, mpi.Get_rank()

    def all_reduce(self, array: Array, op: str) -> None:
        """MPI_Allreduce in place."""
        self.mpi.Allreduce(MPI.IN_PLACE, array, _operation(op, array))

    def reduce(self, array: Array, root: int, op: str) -> None:
        """MPI_Reduce in place at the root."""
        at_root = self.rank == root
        operation = _operation(op, array)
        self.mpi.Reduce(MPI.IN_PLACE if at_root else array, array if at_root else None, operation, root)

    def broadcast(self, array: Array, root: int) -> None:
        """MPI_Bcast."""
        self.mpi.Bcast(as_bytes(array), root)

    def reduce_scatter(self, array: Array, shard: Array, counts: list[int], op: str) -> None:
        """MPI_Reduce_scatter."""
        self.mpi.Reduce_scatter(array, shard, counts, _operation(op, array))

    def all_gather(self, shard: Array, out: Array, counts: list[int]) -> None:
        """MPI_Allgatherv."""
        mine, whole = as_bytes(shard), as_bytes(out)
        in_place = np.may_share_memory(mine, whole)  # MPI wants to be told
        self.mpi.Allgatherv(MPI.IN_PLACE if in_place else mine, _pieces(out, counts))

    def gather(self, shard: Array, out: Array | None, counts: list[int], root: int) -> None:
        """MPI_Gatherv."""
        self.mpi.Gatherv(as_bytes(shard), None if out is None else _pieces(out, counts), root)

    def scatter(self, full: Array | None, shard: Array, counts: list[int], root: int) -> None:
        """MPI_Scatterv."""
        self.mpi.Scatterv(None if full is None else _pieces(full, counts), as_bytes(shard), root)

    def all_to_all(self, leaving: Array, send_counts: list[int], arriving: Array, receive_counts: list[int]) -> None:
        """MPI_Alltoallv."""
        self.mpi.Alltoallv(_pieces(leaving, send_counts), _pieces(arriving, receive_counts))


def _operation(op: str, array: Array) -> MPI.Op:
    return known_operation("MPI", op, array, OPERATIONS, UNKNOWN)


def _pieces(array: Array, counts: list[int]) -> list[Any]:
    """Return the array as bytes, and how many of them belong to each rank."""
    return [as_bytes(array), [count * array.itemsize for count in counts]]
