"""Hypercubes: in round k a rank talks to the one whose number differs in bit k.

    recursive doubling, 4 ranks      round 0: 0⇄1  2⇄3        round 1: 0⇄2  1⇄3
    each rank sends its whole sum    0+1 0+1  2+3 2+3          all four ranks: 0+1+2+3

Doubling: each rank sends log2 P messages of n bytes, the fewest latencies possible. Halving sends
half of the remaining data in each round. A reduce-scatter by halving and an all-gather by doubling
together move 2 (P - 1)/P n bytes in 2 log2 P messages: as few bytes as a ring, far fewer latencies.
(Thakur, Rabenseifner & Gropp 2005, sections 4.4, 4.5.)

Let Q be the largest power of two that is at most P. Each rank from Q on first hands its data to a
partner below Q, and gets the result back at the end: two more messages of n bytes.
"""

from itertools import accumulate

from minidist.full.collectives.fast import cut, temporary
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array, Chunks
from minidist.full.comm.communicator import Communicator


def power_below(ranks: int) -> int:
    """Return the largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def distances(ranks: int) -> list[int]:
    """Return how far apart partners are in each round among a power of two of ranks: 1, 2, 4, ...,
    ranks/2.
    """
    return [1 << bit for bit in range(ranks.bit_length() - 1)]


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Reduce in every rank's `array` by recursive doubling: log2 P messages of n bytes a rank."""
    if _fold(array, comm, combine):
        arriving = temporary(comm, array, len(array))
        for distance in distances(power_below(comm.size)):
            partner = comm.rank ^ distance
            comm.exchange(array, partner, arriving, partner)
            lower, upper = (array, arriving) if comm.rank < partner else (arriving, array)
            # in one order on both sides: max(-0, 0) or NaN + NaN would differ in bits
            combine(lower, upper, array)
    _unfold(array, comm)


def halving_doubling(array: Array, comm: Communicator, combine: Combine) -> None:
    """Reduce in every rank's `array`: reduce-scatter by halving, then all-gather by doubling."""
    if _fold(array, comm, combine):
        ranks = power_below(comm.size)
        ends = list(accumulate(cut(len(array), ranks), initial=0))
        _halve(array, ends, ranks, comm, combine)
        _double(array, ends, ranks, comm)
    _unfold(array, comm)


def reduce_scatter(
    chunks: Chunks,
    out: Array,
    comm: Communicator,
    combine: Combine,
) -> None:
    """Leave in `out` the reduction of chunk `comm.rank`, by halving a copy of the chunks.

    A power of two of ranks only: other numbers would have to move whole buffers first.
    """
    ends = list(accumulate(chunks.lengths, initial=0))
    partial = temporary(comm, out, ends[-1], slot=1)
    comm.copy(partial, chunks.whole)
    _halve(partial, ends, comm.size, comm, combine)
    comm.copy(out, partial[ends[comm.rank] : ends[comm.rank + 1]])


def all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Fill every chunk by recursive doubling: the chunks of a rank double in each round. A power of
    two of ranks only.

    The chunks may lie anywhere in memory, so each is one message: P - 1 messages a rank.
    """
    for distance in distances(comm.size):
        partner = comm.rank ^ distance
        here, there = comm.rank // distance * distance, partner // distance * distance
        for offset in range(distance):
            comm.exchange(chunks[here + offset], partner, chunks[there + offset], partner)


def _halve(
    array: Array,
    ends: list[int],
    ranks: int,
    comm: Communicator,
    combine: Combine,
) -> None:
    """Complete chunk r = `comm.rank`, from ends[r] to ends[r + 1], in place; the rest of `array` is
    overwritten.
    """
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


def _double(
    array: Array,
    ends: list[int],
    ranks: int,
    comm: Communicator,
) -> None:
    """Gather the chunks that `_halve` has completed: exchange ever longer runs of them."""
    for distance in distances(ranks):
        partner = comm.rank ^ distance
        here, there = comm.rank // distance * distance, partner // distance * distance
        leaving = array[ends[here] : ends[here + distance]]
        arriving = array[ends[there] : ends[there + distance]]
        comm.exchange(leaving, partner, arriving, partner)


def _fold(array: Array, comm: Communicator, combine: Combine) -> bool:
    """Combine the data of each rank from Q on into its partner below Q; return whether this rank is
    below Q.
    """
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
    """Send the result to the ranks from Q on."""
    ranks = power_below(comm.size)
    if comm.rank >= ranks:
        comm.recv(array, comm.rank - ranks)
    elif comm.rank + ranks < comm.size:
        comm.send(array, comm.rank + ranks)
