"""Binomial trees: in each round, every rank that has the data passes it on.

    broadcast from 0, 8 ranks     round 1: 0→4        round 2: 0→2 4→6        round 3: 0→1 2→3 4→5 6→7

A broadcast takes ceil(log2 P) rounds instead of P - 1. A reduce is the same tree with the arrows
reversed. Gather and scatter send the shards of a subtree together. The root has number 0; the other
numbers count from it. Cost for n bytes: broadcast and reduce send P - 1 messages of n bytes in
total; gather and scatter move n/2 log2 P bytes in total, at most. (Thakur, Rabenseifner & Gropp
2005, section 4.1.)
"""

from minidist.full.collectives.fast import blocks, temporary
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array, Chunks, empty
from minidist.full.comm.communicator import Communicator


def family(comm: Communicator, root: int) -> tuple[int | None, list[int]]:
    """Return (parent, children) of this rank in the binomial tree, the largest subtree first."""
    number = (comm.rank - root) % comm.size
    span = 1
    while span < comm.size and not number & span:
        span *= 2
    parent = None if number == 0 else (number - span + root) % comm.size
    children = []
    while span > 1:
        span //= 2
        if number + span < comm.size:
            children.append((number + span + root) % comm.size)
    return parent, children


def broadcast(array: Array, comm: Communicator, root: int) -> None:
    """Copy the root's `array` into every rank's, in blocks, so that all levels of the tree work at
    the same time.
    """
    parent, children = family(comm, root)
    for block in blocks(array):
        if parent is not None:
            comm.recv(block, parent)
        for request in [comm.isend(block, child) for child in children]:
            request.wait()


def reduce(
    array: Array,
    comm: Communicator,
    root: int,
    combine: Combine,
) -> None:
    """Leave the reduction in the root's `array`; the others keep theirs."""
    parent, children = family(comm, root)
    for block in blocks(array):
        total = block
        for child in reversed(children):  # the smallest subtree is ready first
            arriving = temporary(comm, block, len(block))
            comm.recv(arriving, child)
            target = block
            if parent is not None:
                target = temporary(comm, block, len(block), slot=1)
            combine(total, arriving, target)
            total = target
        if parent is not None:
            comm.send(total, parent)


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction in every rank's `array`: a reduce and a broadcast, 2 ceil(log2 P) rounds
    of n bytes.
    """
    reduce(array, comm, 0, combine)
    broadcast(array, comm, 0)


def gather(
    shard: Array, chunks: list[Array] | None, comm: Communicator, root: int, counts: list[int]
) -> None:
    """Collect every rank's shard in the root's `chunks`; a rank sends the shards of its subtree as
    one message.
    """
    parent, children = family(comm, root)
    held, inside = _subtree(shard, comm, root, counts)
    comm.copy(inside[0], shard)
    for child in children:
        comm.recv(_part(inside, held.index(child)), child)
    if parent is not None:
        comm.send(inside.whole, parent)
    elif chunks is not None:
        for rank, piece in zip(held, inside, strict=True):
            comm.copy(chunks[rank], piece)


def scatter(
    chunks: list[Array] | None, shard: Array, comm: Communicator, root: int, counts: list[int]
) -> None:
    """Copy chunk r of the root into rank r's `shard`; the chunks of a subtree travel as one
    message.
    """
    parent, children = family(comm, root)
    held, inside = _subtree(shard, comm, root, counts)
    if parent is not None:
        comm.recv(inside.whole, parent)
    elif chunks is not None:
        for rank, piece in zip(held, inside, strict=True):
            comm.copy(piece, chunks[rank])
    for child in children:
        comm.send(_part(inside, held.index(child)), child)
    comm.copy(shard, inside[0])


def _subtree(
    shard: Array, comm: Communicator, root: int, counts: list[int]
) -> tuple[list[int], Chunks]:
    """Return the ranks of this rank's subtree, which have consecutive numbers, and memory for their
    shards.
    """
    number = (comm.rank - root) % comm.size
    span = comm.size if number == 0 else number & -number
    held = [(n + root) % comm.size for n in range(number, min(number + span, comm.size))]
    lengths = [counts[rank] for rank in held]
    return held, Chunks(empty(shard, sum(lengths)), lengths)


def _part(inside: Chunks, first: int) -> Array:
    """Return the shards of a child's subtree: a child whose number is greater by `first` has so
    many ranks at most.
    """
    start = sum(inside.lengths[:first])
    return inside.whole[start : start + sum(inside.lengths[first : 2 * first])]
