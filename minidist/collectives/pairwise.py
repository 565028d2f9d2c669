"""Pairwise exchange: in step s every rank sends to the one s places on and receives from the one s places back.

P - 1 steps; each rank sends every foreign chunk once, straight to its owner: (P - 1)/P n bytes in P - 1 messages, the
least an all-to-all can do when chunks are large. (Thakur, Rabenseifner & Gropp 2005, sections 4.3 and 4.4.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist.collectives.fast import temporary
from minidist.comm.buffers import copy

if TYPE_CHECKING:
    from minidist.collectives.reduction import Combine
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Chunk j of rank i becomes chunk i of rank j."""
    copy(arriving[comm.rank], leaving[comm.rank])
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(leaving[to], to, arriving[source], source)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Send every foreign chunk to its owner, who adds them up: as many bytes as a ring, and no chain of sums."""
    copy(out, chunks[comm.rank])
    arriving = temporary(comm, out, len(out))
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[to], to, arriving, source)
        combine(out, arriving, out)


def all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Send the own chunk to everybody, one after the other."""
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[comm.rank], to, chunks[source], source)
