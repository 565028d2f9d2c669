"""Rings: every rank sends to its right and receives from its left, all at the same time.

    reduce-scatter, 3 ranks       step 1                 step 2
    rank 0 sends to rank 1        c2 (own)               c1 (of ranks 2, 0)
    rank 1 sends to rank 2        c0 (own)               c2 (of ranks 0, 1)
    rank 2 sends to rank 0        c1 (own)               c0 (of ranks 1, 2)
    then rank r adds its own part to c_r, which is complete.

An all-reduce is a reduce-scatter and an all-gather. For n bytes each of the two sends (P - 1)/P n
bytes from each rank, in P - 1 messages. No algorithm sends fewer: a rank has data for each of the
P - 1 chunks that others own. But 2(P - 1) latencies are slow for small buffers.
(Patarasuk & Yuan 2009, section 3.)
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from minidist.comm import Communicator, empty_like

Chunk: TypeAlias = Any  # a flat array or tensor, often a view
Reduce: TypeAlias = Callable[[Chunk, Chunk], object]  # adds its second argument to its first


def ring_all_reduce(chunks: Sequence[Chunk], comm: Communicator, reduce: Reduce) -> None:
    """Leave the sum over all ranks in every chunk of every rank."""
    own = ring_reduce_scatter(chunks, comm, reduce)
    chunks[comm.rank][:] = own
    ring_all_gather(chunks, comm)


def ring_reduce_scatter(chunks: Sequence[Chunk], comm: Communicator, reduce: Reduce) -> Chunk:
    """Return the sum of all ranks' chunk number `comm.rank`. The chunks stay as they are."""
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    leaving = chunks[left]  # this rank's own part only
    for step in range(1, comm.size):
        number = (comm.rank - step - 1) % comm.size
        own = chunks[number]
        arriving = empty_like(own)
        comm.exchange(leaving, right, arriving, left)
        reduce(arriving, own)  # arriving += own
        leaving = arriving  # now the parts of step + 1 ranks: this one and those to its left
    return leaving


def ring_all_gather(chunks: Sequence[Chunk], comm: Communicator) -> None:
    """Fill in every chunk from its owner: rank r owns chunk r."""
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        number = (comm.rank - step) % comm.size
        leaving = chunks[number]  # complete: its own, or the last to come
        arriving = chunks[(number - 1) % comm.size]  # not complete yet
        comm.exchange(leaving, right, arriving, left)
