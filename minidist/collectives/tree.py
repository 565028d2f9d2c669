"""Binomial trees: in each round, everybody who has the data passes it on.

    broadcast from 0, 8 ranks     round 1: 0→4        round 2: 0→2 4→6        round 3: 0→1 2→3 4→5 6→7

ceil(log2 P) rounds instead of P - 1. A reduce is the same tree with the arrows turned round; gather and scatter send a
subtree's shards together. Numbers are relative to the root. Cost for n bytes: P - 1 messages of n bytes in total for
broadcast and reduce; gather and scatter move n/2 log2 P bytes in total. (Thakur, Rabenseifner & Gropp 2005, 4.1.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist.collectives.fast import blocks, temporary
from minidist.comm.buffers import copy, empty

if TYPE_CHECKING:
    from minidist.collectives.reduction import Combine
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator


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
    """Copy the root's `array` into everybody's, block by block so that the levels of the tree work at once."""
    parent, children = family(comm, root)
    for block in blocks(array):
        if parent is not None:
            comm.recv(block, parent)
        for request in [comm.isend(block, child) for child in children]:
            request.wait()


def reduce(array: Array, comm: Communicator, root: int, combine: Combine) -> None:
    """Leave the reduction in the root's `array`; the others keep theirs."""
    parent, children = family(comm, root)
    for block in blocks(array):
        total = block
        for child in reversed(children):  # the smallest subtree is ready first
            arriving = temporary(comm, block, len(block))
            comm.recv(arriving, child)
            target = block if parent is None else temporary(comm, block, len(block), slot=1)
            combine(total, arriving, target)
            total = target
        if parent is not None:
            comm.send(total, parent)


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """A reduce and a broadcast: 2 ceil(log2 P) rounds of n bytes."""
    reduce(array, comm, 0, combine)
    broadcast(array, comm, 0)


def gather(shard: Array, chunks: list[Array] | None, comm: Communicator, root: int, counts: list[int]) -> None:
    """Collect every rank's shard in the root's `chunks`; a rank sends its whole subtree's shards as one message."""
    parent, children = family(comm, root)
    held = _subtree(comm, root, counts)
    inside = shard if parent is not None and not children else empty(shard, sum(counts[rank] for rank in held))
    if inside is not shard:
        copy(inside[: counts[comm.rank]], shard)
    for child, (start, end) in zip(children, _spans(comm, root, held, children, counts), strict=True):
        comm.recv(inside[start:end], child)
    if parent is not None:
        comm.send(inside, parent)
    elif chunks is not None:
        _unpack(inside, [chunks[rank] for rank in held])


def scatter(chunks: list[Array] | None, shard: Array, comm: Communicator, root: int, counts: list[int]) -> None:
    """Hand chunk r of the root to rank r, each subtree's chunks as one message."""
    parent, children = family(comm, root)
    held = _subtree(comm, root, counts)
    inside = empty(shard, sum(counts[rank] for rank in held)) if children or parent is None else shard
    if parent is not None:
        comm.recv(inside, parent)
    elif chunks is not None:
        start = 0
        for rank in held:
            copy(inside[start : start + counts[rank]], chunks[rank])
            start += counts[rank]
    spans = _spans(comm, root, held, children, counts)
    for child, (start, end) in zip(children, spans, strict=True):
        comm.send(inside[start:end], child)
    if inside is not shard:
        copy(shard, inside[: counts[comm.rank]])


def _subtree(comm: Communicator, root: int, counts: list[int]) -> list[int]:
    """Return the ranks of the subtree that hangs from this rank: consecutive numbers, counted from the root."""
    number = (comm.rank - root) % comm.size
    span = comm.size if number == 0 else number & -number
    return [(n + root) % comm.size for n in range(number, min(number + span, comm.size))]


def _spans(
    comm: Communicator, root: int, held: list[int], children: list[int], counts: list[int]
) -> list[tuple[int, int]]:
    """Return where in this rank's subtree buffer each child's subtree lies."""
    starts = [0]
    for rank in held:
        starts.append(starts[-1] + counts[rank])
    first = [held.index(child) for child in children]
    after = [len(held), *first]  # children come largest number first, and each subtree ends where the last began
    return [(starts[begin], starts[end]) for begin, end in zip(first, after, strict=False)]


def _unpack(array: Array, chunks: list[Array]) -> None:
    start = 0
    for chunk in chunks:
        copy(chunk, array[start : start + len(chunk)])
        start += len(chunk)
