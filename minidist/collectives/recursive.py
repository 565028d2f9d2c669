"""Hypercubes: in round k a rank talks to the one whose number differs in bit k.

    recursive doubling, 4 ranks      round 0: 0⇄1  2⇄3        round 1: 0⇄2  1⇄3
    everybody sends everything       0+1 0+1  2+3 2+3          all four ranks: 0+1+2+3

Doubling: log2 P messages of n bytes a rank, the fewest latencies there are. Halving sends half of what is left in each
round, so a reduce-scatter by halving and an all-gather by doubling move 2 (P - 1)/P n bytes in 2 log2 P messages: as
few bytes as a ring, far fewer latencies. (Thakur, Rabenseifner & Gropp 2005, sections 4.4 and 4.5.)

Ranks beyond the largest power of two, Q, first hand their data to a partner below Q and get the result back at the
end: two more messages of n bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist.collectives.fast import chunks_of, cut, temporary
from minidist.comm.buffers import copy

if TYPE_CHECKING:
    from minidist.collectives.reduction import Combine
    from minidist.comm.buffers import Array
    from minidist.comm.communicator import Communicator


def power_below(ranks: int) -> int:
    """Return the largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Recursive doubling."""
    if _fold(array, comm, combine):
        arriving = temporary(comm, array, len(array))
        distance, ranks = 1, power_below(comm.size)
        while distance < ranks:
            partner = comm.rank ^ distance
            comm.exchange(array, partner, arriving, partner)
            lower, upper = (array, arriving) if comm.rank < partner else (arriving, array)
            combine(lower, upper, array)  # in one order on both sides: max(-0, 0) or NaN + NaN would differ in bits
            distance *= 2
    _unfold(array, comm)


def halving_doubling(array: Array, comm: Communicator, combine: Combine) -> None:
    """Reduce-scatter by halving, then all-gather by doubling, among the largest power of two of ranks."""
    if _fold(array, comm, combine):
        ranks = power_below(comm.size)
        chunks = chunks_of(array, cut(len(array), ranks))
        ends = [0]
        for chunk in chunks:
            ends.append(ends[-1] + len(chunk))
        _halve(array, ends, ranks, comm, combine)
        _double(array, ends, ranks, comm)
    _unfold(array, comm)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Recursive halving on a copy; a power of two of ranks only, others would first have to move whole buffers."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk))
    partial = temporary(comm, out, ends[-1], slot=1)
    for owner, chunk in enumerate(chunks):
        copy(partial[ends[owner] : ends[owner + 1]], chunk)
    _halve(partial, ends, comm.size, comm, combine)
    copy(out, partial[ends[comm.rank] : ends[comm.rank + 1]])


def all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Recursive doubling: what a rank holds doubles in each round. A power of two of ranks only.

    The chunks a rank passes on lie side by side in the result, but they need not in memory: each is one message.
    """
    distance = 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        here, there = comm.rank // distance * distance, partner // distance * distance
        for offset in range(distance):
            comm.exchange(chunks[here + offset], partner, chunks[there + offset], partner)
        distance *= 2


def _halve(array: Array, ends: list[int], ranks: int, comm: Communicator, combine: Combine) -> None:
    """Leave chunk `comm.rank` (from ends[r] to ends[r + 1]) complete in place; what lies around it is spent."""
    first, last = 0, ranks  # the chunks that this rank still works on
    while last - first > 1:
        middle, distance = (first + last) // 2, (last - first) // 2
        partner = comm.rank ^ distance
        keep, give = (first, middle), (middle, last)
        if comm.rank >= middle:
            keep, give = give, keep
        mine = array[ends[keep[0]] : ends[keep[1]]]
        arriving = temporary(comm, array, len(mine))
        comm.exchange(array[ends[give[0]] : ends[give[1]]], partner, arriving, partner)
        combine(mine, arriving, mine)
        first, last = keep


def _double(array: Array, ends: list[int], ranks: int, comm: Communicator) -> None:
    """Undo `_halve`'s dealing out: exchange ever larger runs of complete chunks."""
    distance = 1
    while distance < ranks:
        partner = comm.rank ^ distance
        here, there = comm.rank // distance * distance, partner // distance * distance
        leaving = array[ends[here] : ends[here + distance]]
        comm.exchange(leaving, partner, array[ends[there] : ends[there + distance]], partner)
        distance *= 2


def _fold(array: Array, comm: Communicator, combine: Combine) -> bool:
    """Hand the data of the ranks from Q on to those below; return whether this rank takes part in the rounds."""
    ranks = power_below(comm.size)
    if comm.rank >= ranks:
        comm.send(array, comm.rank - ranks)
        return False
    if comm.rank + ranks < comm.size:
        arriving = temporary(comm, array, len(array))
        comm.recv(arriving, comm.rank + ranks)
        combine(array, arriving, array)
    return True


def _unfold(array: Array, comm: Communicator) -> None:
    ranks = power_below(comm.size)
    if comm.rank >= ranks:
        comm.recv(array, comm.rank - ranks)
    elif comm.rank + ranks < comm.size:
        comm.send(array, comm.rank + ranks)
