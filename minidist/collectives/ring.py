"""Rings: every rank sends to its right and receives from its left, all at the same time.

    reduce-scatter, 3 ranks       step 1                 step 2
    rank 0 sends to rank 1        c2 (own)               c1 (of ranks 2, 0)
    rank 1 sends to rank 2        c0 (own)               c2 (of ranks 0, 1)
    rank 2 sends to rank 0        c1 (own)               c0 (of ranks 1, 2)
    then rank r adds its own part to c_r, which is complete.

An all-reduce is a reduce-scatter and an all-gather. Cost per rank for n bytes: each of the two
sends (P - 1)/P n bytes in P - 1 messages. No algorithm sends fewer bytes: a rank has data for each
of the P - 1 chunks that other ranks own. All links carry equally much. Small buffers are slow: 2(P
- 1) latencies. (Patarasuk & Yuan 2009, section 3.)
"""

from collections.abc import Callable

from minidist.collectives.fast import cut, empty_like
from minidist.collectives.reduction import Combine
from minidist.comm.buffers import Array, Chunks
from minidist.comm.communicator import Communicator


def ring_all_reduce(array: Array, comm: Communicator, reduce: Combine) -> None:
    """Leave the sum of all ranks' arrays in every rank's `array`."""
    chunks = Chunks(array, cut(len(array), comm.size))
    ring_reduce_scatter(chunks, chunks[comm.rank], comm, reduce)
    ring_all_gather(chunks, comm)


def ring_reduce_scatter(
    chunks: list[Array],
    out: Array,
    comm: Communicator,
    reduce: Combine,
    room: Callable[[Array], Array] = empty_like,
) -> None:
    """Leave in `out` the sum of all ranks' chunk number `comm.rank`. The chunks stay as they are.

    `out` may be this rank's own chunk, and must be it if there is one rank. `room` returns memory
    for a message.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = chunks[left]  # holds this rank's own part only
    for step in range(2, comm.size + 1):
        own = chunks[(comm.rank - step) % comm.size]
        arriving = room(own)
        comm.exchange(leaving, right, arriving, left)
        # the last sum is complete and leaves no more
        leaving = arriving if step < comm.size else out
        reduce(arriving, own, leaving)


def ring_all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Fill in every chunk from its owner: first send chunk number `comm.rank`, then the chunk that
    arrived last.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        leaving = chunks[(comm.rank - step) % comm.size]
        arriving = chunks[(comm.rank - step - 1) % comm.size]
        comm.exchange(leaving, right, arriving, left)
