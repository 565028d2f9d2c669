"""MPI's own collectives, to compare with. What they send is their secret: `traffic` has it by
formula.
"""

from typing import Any

from mpi4py import MPI

from minidist.comm.buffers import Array, Chunks, as_bytes
from minidist.comm.engine.operation import Operation, check_reducible
from minidist.comm.ledger import Ranks

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
# it has no type of the first two, and no sum or maximum of truth values
UNKNOWN = ("float16", "bfloat16", "bool")


class NativeMpi:
    """MPI's collectives on flat arrays, called as all algorithms of the collectives are.

    What is not reduced travels as bytes, of whatever dtype.
    """

    def __init__(self, mpi: MPI.Intracomm):
        self.mpi = mpi

    def all_reduce(self, array: Array, comm: Ranks, combine: Operation) -> None:
        """MPI_Allreduce in place."""
        self.mpi.Allreduce(MPI.IN_PLACE, array, _operation(combine, array))

    def reduce(
        self,
        array: Array,
        comm: Ranks,
        root: int,
        combine: Operation,
    ) -> None:
        """MPI_Reduce in place at the root."""
        at_root, operation = comm.rank == root, _operation(combine, array)
        self.mpi.Reduce(
            MPI.IN_PLACE if at_root else array, array if at_root else None, operation, root
        )

    def broadcast(self, array: Array, comm: Ranks, root: int) -> None:
        """MPI_Bcast."""
        self.mpi.Bcast(as_bytes(array), root)

    def reduce_scatter(
        self,
        chunks: Chunks,
        out: Array,
        comm: Ranks,
        combine: Operation,
    ) -> None:
        """MPI_Reduce_scatter."""
        self.mpi.Reduce_scatter(
            chunks.whole,
            out,
            chunks.lengths,
            _operation(combine, out),
        )

    def all_gather(self, chunks: Chunks, comm: Ranks) -> None:
        """MPI_Allgatherv, in place: this rank's chunk is filled."""
        self.mpi.Allgatherv(MPI.IN_PLACE, _pieces(chunks))

    def gather(
        self, shard: Array, chunks: Chunks | None, comm: Ranks, root: int, lengths: list[int]
    ) -> None:
        """MPI_Gatherv."""
        self.mpi.Gatherv(as_bytes(shard), None if chunks is None else _pieces(chunks), root)

    def scatter(
        self, chunks: Chunks | None, shard: Array, comm: Ranks, root: int, lengths: list[int]
    ) -> None:
        """MPI_Scatterv."""
        self.mpi.Scatterv(None if chunks is None else _pieces(chunks), as_bytes(shard), root)

    def all_to_all(self, leaving: Chunks, arriving: Chunks, comm: Ranks) -> None:
        """MPI_Alltoallv."""
        self.mpi.Alltoallv(_pieces(leaving), _pieces(arriving))


def _operation(combine: Operation, array: Array) -> MPI.Op:
    check_reducible("MPI", array, UNKNOWN)
    return OPERATIONS[combine.op]


def _pieces(chunks: Chunks) -> list[Any]:
    """Return the whole array as bytes, and how many of them belong to each rank."""
    return [as_bytes(chunks.whole), [length * chunks.whole.itemsize for length in chunks.lengths]]
