"""MPI's own collectives, to compare with. What they send is their secret: `traffic` has it by
formula.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from minidist.full.comm.buffers import Array, Chunks
from minidist.full.comm.engine.operation import Operation, check_reducible
from minidist.full.comm.ledger import Ranks
from minidist.full.comm.mpi_wire.memory import bytes_of, check_on_cpu

OPERATIONS = {
    "sum": MPI.SUM,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "prod": MPI.PROD,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
# it has no type of the first two, and no sum or maximum of truth values
UNKNOWN = ("float16", "bfloat16", "bool")


@dataclass
class NativeMpi:
    """MPI's collectives on flat arrays, called as all algorithms of the collectives are.

    What is not reduced travels as bytes, of whatever dtype.
    """

    mpi: Any

    def all_reduce(self, array: Array, comm: Ranks, combine: Operation) -> Any:
        """MPI_Allreduce in place."""
        return self.mpi.Allreduce(MPI.IN_PLACE, array, _operation(combine, array))

    def reduce(
        self,
        array: Array,
        comm: Ranks,
        root: int,
        combine: Operation,
    ) -> Any:
        """MPI_Reduce in place at the root."""
        at_root, operation = comm.rank == root, _operation(combine, array)
        return self.mpi.Reduce(
            MPI.IN_PLACE if at_root else array, array if at_root else None, operation, root
        )

    def broadcast(self, array: Array, comm: Ranks, root: int) -> Any:
        """MPI_Bcast."""
        return self.mpi.Bcast(bytes_of(array), root)

    def reduce_scatter(
        self,
        chunks: Chunks,
        out: Array,
        comm: Ranks,
        combine: Operation,
    ) -> Any:
        """MPI_Reduce_scatter."""
        return self.mpi.Reduce_scatter(
            chunks.whole,
            out,
            chunks.lengths,
            _operation(combine, out),
        )

    def all_gather(self, chunks: Chunks, comm: Ranks) -> Any:
        """MPI_Allgatherv, in place: this rank's chunk is filled."""
        return self.mpi.Allgatherv(MPI.IN_PLACE, _pieces(chunks))

    def gather(
        self, shard: Array, chunks: Chunks | None, comm: Ranks, root: int, lengths: list[int]
    ) -> Any:
        """MPI_Gatherv."""
        return self.mpi.Gatherv(bytes_of(shard), None if chunks is None else _pieces(chunks), root)

    def scatter(
        self, chunks: Chunks | None, shard: Array, comm: Ranks, root: int, lengths: list[int]
    ) -> Any:
        """MPI_Scatterv."""
        return self.mpi.Scatterv(None if chunks is None else _pieces(chunks), bytes_of(shard), root)

    def all_to_all(self, leaving: Chunks, arriving: Chunks, comm: Ranks) -> Any:
        """MPI_Alltoallv."""
        return self.mpi.Alltoallv(_pieces(leaving), _pieces(arriving))


@dataclass
class OnlyPrepared:
    """An MPI communicator whose collectives are only prepared: each returns a persistent request.

    (MPI 4.0, section 6.13.)
    """

    mpi: MPI.Intracomm

    def __getattr__(self, collective: str) -> Any:
        return getattr(self.mpi, f"{collective}_init")


class Persistent:
    """A collective that MPI has been told of once."""

    def __init__(self, request: Any) -> None:
        self.request = request
        weakref.finalize(self, request.Free).atexit = False

    def __call__(self) -> None:
        """Run it again."""
        self.request.Start()
        self.request.Wait()


def persistent(mpi: MPI.Intracomm, what: str, arguments: tuple[Any, ...]) -> Persistent | None:
    """Return a collective of `NativeMpi` as a persistent one, or None if this MPI has none yet."""
    try:
        return Persistent(getattr(NativeMpi(OnlyPrepared(mpi)), what)(*arguments))
    except NotImplementedError:
        return None


def _operation(combine: Operation, array: Array) -> MPI.Op:
    check_on_cpu(array)
    check_reducible("MPI", array, UNKNOWN)
    return OPERATIONS[combine.op]


def _pieces(chunks: Chunks) -> list[Any]:
    """Return the whole array as bytes, and how many of them belong to each rank."""
    return [bytes_of(chunks.whole), [length * chunks.whole.itemsize for length in chunks.lengths]]
