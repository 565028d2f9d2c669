"""The engines' own collectives, to compare with. Not counted in `traffic`: what they send is their secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from minidist.comm.buffers import dtype_name

if TYPE_CHECKING:
    from minidist.comm.buffers import Array
    from minidist.comm.mpi import MpiCommunicator

OPERATIONS = {
    "sum": MPI.SUM,
    "mean": MPI.SUM,  # the caller divides
    "max": MPI.MAX,
    "min": MPI.MIN,
    "prod": MPI.PROD,
}


class NativeMpi:
    """MPI's collectives on flat arrays. `counts` are the elements of each rank's shard."""

    def __init__(self, comm: MpiCommunicator):
        self.comm, self.mpi = comm, comm.mpi

    def all_reduce(self, array: Array, op: str) -> None:
        """MPI_Allreduce in place."""
        self.mpi.Allreduce(MPI.IN_PLACE, _known(array), OPERATIONS[op])

    def reduce(self, array: Array, root: int, op: str) -> None:
        """MPI_Reduce in place at the root."""
        at_root = self.comm.rank == root
        self.mpi.Reduce(
            MPI.IN_PLACE if at_root else _known(array), _known(array) if at_root else None, OPERATIONS[op], root
        )

    def broadcast(self, array: Array, root: int) -> None:
        """MPI_Bcast."""
        self.mpi.Bcast(_known(array), root)

    def reduce_scatter(self, array: Array, shard: Array, counts: list[int], op: str) -> None:
        """MPI_Reduce_scatter."""
        self.mpi.Reduce_scatter(_known(array), _known(shard), counts, OPERATIONS[op])

    def all_gather(self, shard: Array, out: Array, counts: list[int]) -> None:
        """MPI_Allgatherv."""
        self.mpi.Allgatherv(_known(shard), [_known(out), counts])

    def gather(self, shard: Array, out: Array | None, counts: list[int], root: int) -> None:
        """MPI_Gatherv."""
        self.mpi.Gatherv(_known(shard), None if out is None else [_known(out), counts], root)

    def scatter(self, full: Array | None, shard: Array, counts: list[int], root: int) -> None:
        """MPI_Scatterv."""
        self.mpi.Scatterv(None if full is None else [_known(full), counts], _known(shard), root)

    def all_to_all(self, leaving: Array, send_counts: list[int], arriving: Array, receive_counts: list[int]) -> None:
        """MPI_Alltoallv."""
        self.mpi.Alltoallv([_known(leaving), send_counts], [_known(arriving), receive_counts])


def _known(array: Array) -> Any:
    if dtype_name(array) in ("bfloat16", "float16"):
        raise TypeError(
            f"MPI has no {dtype_name(array)} and cannot reduce it: choose another algorithm than 'native', or float32"
        )
    return array
