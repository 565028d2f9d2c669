"""The parameter server, the naive family: one rank exchanges a message with each of the others.

    ranks 1, 2, 3 ──n bytes──▶ rank 0 ──n bytes──▶ ranks 1, 2, 3

Cost: the root receives (P - 1) n bytes through its one port, and sends as many, while the other
ranks wait. So the time grows with P; that of a ring does not. Still, no gather or scatter moves
fewer bytes. (Li et al. 2014.)
"""

from minidist.full.collectives.fast import temporary
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array
from minidist.full.comm.communicator import Communicator


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction in every rank's `array`: reduce to rank 0, then broadcast. 2 (P - 1)
    messages.
    """
    reduce(array, comm, 0, combine)
    broadcast(array, comm, 0)


def reduce(array: Array, comm: Communicator, root: int, combine: Combine) -> None:
    """Leave the reduction in the root's `array`; the others keep theirs."""
    if comm.rank != root:
        comm.send(array, root)
        return
    arriving = temporary(comm, array, len(array))
    for rank in range(comm.size):
        if rank != root:
            comm.recv(arriving, rank)
            combine(array, arriving, array)


def broadcast(array: Array, comm: Communicator, root: int) -> None:
    """Copy the root's `array` into every rank's."""
    if comm.rank != root:
        comm.recv(array, root)
        return
    for request in [comm.isend(array, rank) for rank in range(comm.size) if rank != root]:
        request.wait()


def gather(
    shard: Array, chunks: list[Array] | None, comm: Communicator, root: int, lengths: list[int]
) -> None:
    """Collect every rank's shard, of `lengths` elements, in the root's `chunks`."""
    if chunks is None:
        comm.send(shard, root)
        return
    comm.copy(chunks[root], shard)
    for request in [comm.irecv(chunks[rank], rank) for rank in range(comm.size) if rank != root]:
        request.wait()


def scatter(
    chunks: list[Array] | None, shard: Array, comm: Communicator, root: int, lengths: list[int]
) -> None:
    """Copy chunk r of the root, of `lengths` elements, into rank r's `shard`."""
    if chunks is None:
        comm.recv(shard, root)
        return
    comm.copy(shard, chunks[root])
    for request in [comm.isend(chunks[rank], rank) for rank in range(comm.size) if rank != root]:
        request.wait()
