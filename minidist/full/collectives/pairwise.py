"""Pairwise exchange: in step s, rank r sends to rank r + s and receives from rank r - s, modulo P.

There are P - 1 steps. Each rank sends every chunk of another rank once, straight to its owner:
(P - 1)/P n bytes in P - 1 messages. No all-to-all of large chunks sends fewer bytes. (Thakur,
Rabenseifner & Gropp 2005, sections 4.3, 4.4.)
"""

from minidist.full.collectives.fast import temporary
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array
from minidist.full.comm.communicator import Communicator


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Copy chunk j of rank i's `leaving` into chunk i of rank j's `arriving`."""
    comm.copy(arriving[comm.rank], leaving[comm.rank])
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(leaving[to], to, arriving[source], source)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Leave in `out` the reduction of chunk `comm.rank`, whose owner combines P - 1 arriving copies
    itself.
    """
    comm.copy(out, chunks[comm.rank])
    arriving = temporary(comm, out, len(out))
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[to], to, arriving, source)
        combine(out, arriving, out)


def all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Fill in every chunk: each rank sends its own chunk to all others, one after the other."""
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[comm.rank], to, chunks[source], source)
