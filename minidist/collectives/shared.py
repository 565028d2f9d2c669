"""Shared memory: the ranks of one node read each other's buffers in place, as GPUs do over NVLink.

    registered buffers     fence   rank r: add chunk r of all, write the sum into everybody's chunk r   fence
    ordinary buffers       copy a segment into registered memory first, and the result out of it

No message is sent; what a rank reads from or writes to another's memory is counted as sent. All-reduce: 2 (P - 1)/P n
bytes a rank, as in a ring, but in two fences instead of 2(P - 1) messages, and without the copies that messages make.
Up to `SMALL` bytes every rank adds up everything itself: (P - 1) n bytes and a single fence.
(NCCL's user buffer registration and PyTorch's symmetric memory are the same idea.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.collectives.fast import SEGMENT, blocks, chunks_of, cut, view_as
from minidist.comm.buffers import as_bytes, copy

if TYPE_CHECKING:
    from minidist.collectives.reduction import Combine
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator

SMALL = 1 << 14


def possible(comm: Communicator) -> bool:
    """Tell whether all ranks share memory."""
    return len(comm.node) == comm.size


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    peers = comm.peers(array)
    if peers is not None:
        comm.fence()
        _reduce_own_chunk([view_as(as_bytes(peer), array) for peer in peers], comm, combine)
        comm.fence()
    elif array.nbytes <= SMALL:
        copies = _publish(array, comm)
        _add_up(copies, array, comm, combine)
    else:
        for block in blocks(array):
            copies = _publish(block, comm)
            _reduce_own_chunk(copies, comm, combine, write_back=False)
            comm.fence()
            counts = cut(len(block), comm.size)
            for owner, target in enumerate(chunks_of(block, counts)):
                _read(chunks_of(copies[owner], counts)[owner], target, owner, comm)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Leave in `out` the reduction of all ranks' chunk number `comm.rank`."""
    for pieces in _segments(chunks, comm.size):
        mine = pieces[comm.rank]
        everyones = _publish_pieces(pieces, comm)
        target, out = out[: len(mine)], out[len(mine) :]
        copy(target, mine)
        for rank in range(comm.size):
            if rank != comm.rank:
                combine(target, everyones[rank][comm.rank], target)
                comm.reach(target.nbytes, rank)


def all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Fill every chunk from the rank that owns it; chunk number `comm.rank` is this rank's contribution."""
    for pieces in _segments(chunks, 1):
        copies = _publish(pieces[comm.rank], comm, longest=max(piece.nbytes for piece in pieces))
        for owner, piece in enumerate(pieces):
            _read(copies[owner][: len(piece)], piece, owner, comm)


def broadcast(array: Array, comm: Communicator, root: int) -> None:
    """Copy the root's `array` into everybody's."""
    for block in blocks(array):
        halves = [view_as(half, block) for half in _half(block.nbytes, comm)]
        if comm.rank == root:
            copy(halves[root], block)
        comm.fence()
        _read(halves[root], block, root, comm)


def _reduce_own_chunk(copies: list[Array], comm: Communicator, combine: Combine, write_back: bool = True) -> None:
    """Reduce chunk `comm.rank` of all copies into this rank's, and on request into everybody's.

    Nobody else reads or writes this chunk meanwhile. Block by block: the sum is written while it is in the cache.
    """
    rank = comm.rank
    own = [chunks_of(memory, cut(len(memory), comm.size))[rank] for memory in copies]
    others = [peer for peer in range(comm.size) if peer != rank]
    for pieces in zip(*(blocks(chunk) for chunk in own), strict=True):
        for peer in others:
            combine(pieces[rank], pieces[peer], pieces[rank])
        if write_back:
            for peer in others:
                copy(pieces[peer], pieces[rank])
    for peer in others:
        comm.reach(own[rank].nbytes * (2 if write_back else 1), peer)


def _add_up(copies: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Reduce all copies, in the order of ranks on every rank: the same bits everywhere."""
    combine(copies[0], copies[1], out)
    for memory in copies[2:]:
        combine(out, memory, out)
    for peer in range(comm.size):
        if peer != comm.rank:
            comm.reach(out.nbytes, peer)


def _read(memory: Array, target: Array, owner: int, comm: Communicator) -> None:
    copy(target, memory) if owner != comm.rank or memory is not target else None
    if owner != comm.rank:
        comm.reach(target.nbytes, owner)


def _publish(array: Array, comm: Communicator, longest: int | None = None) -> list[Array]:
    """Copy `array` into registered memory and return everybody's copy once all are there."""
    halves = [view_as(half, array) for half in _half(longest or array.nbytes, comm)]
    copy(halves[comm.rank][: len(array)], array)
    comm.fence()
    return halves


def _publish_pieces(pieces: list[Array], comm: Communicator) -> list[list[Array]]:
    """Publish one piece for each rank, the own one left out: nobody else needs it."""
    counts = [len(piece) for piece in pieces]
    halves = [view_as(half, pieces[0]) for half in _half(sum(piece.nbytes for piece in pieces), comm)]
    everyones = [chunks_of(half, counts) for half in halves]
    for rank, piece in enumerate(pieces):
        if rank != comm.rank:
            copy(everyones[comm.rank][rank], piece)
    comm.fence()
    return everyones


def _half(bytes: int, comm: Communicator) -> list[np.ndarray[Any, Any]]:
    """Return `bytes` of everybody's registered memory, from the half that was not used last.

    Two halves save a fence: who writes the one may know that all have finished reading it, since they have come to the
    fence of the other.
    """
    if "staging" not in comm.kept:
        memory = comm.allocate(2 * SEGMENT, np.uint8)
        comm.kept["staging"] = comm.peers(memory)
        comm.kept["parity"] = 0
    parity = comm.kept["parity"] = 1 - comm.kept["parity"]
    return [memory[parity * SEGMENT : parity * SEGMENT + bytes] for memory in comm.kept["staging"]]


def _segments(chunks: list[Array], share: int) -> Iterator[list[Array]]:
    """Yield the chunks cut across into pieces, `share` of which fit a segment."""
    longest = max(len(chunk) for chunk in chunks)
    step = max(1, SEGMENT // share // chunks[0].itemsize)
    for start in range(0, max(longest, 1), step):
        yield [chunk[start : start + step] for chunk in chunks]
