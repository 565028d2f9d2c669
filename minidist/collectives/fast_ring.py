"""The ring of `ring.py` for large buffers: it works in segments, and messages arrive in reused
memory.

a buffer of P chunks   │ c0 ......│ c1 ......│ c2 ......│       a segment is a piece of every chunk, of a megabyte:
segment 1              │ ■■       │ ■■       │ ■■       │       it is still in the cache when it is added and
segment 2              │   ■■     │   ■■     │   ■■     │       sent on
"""

from collections.abc import Callable
from itertools import cycle

from minidist.collectives.fast import cut, segments, temporary
from minidist.collectives.reduction import Combine
from minidist.collectives.ring import ring_all_gather, ring_reduce_scatter
from minidist.comm.buffers import Array, Chunks
from minidist.comm.communicator import Communicator


def all_reduce(array: Array, comm: Communicator, reduce: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    for pieces in segments(Chunks(array, cut(len(array), comm.size))):
        ring_reduce_scatter(pieces, pieces[comm.rank], comm, reduce, kept_room(pieces, comm))
        ring_all_gather(pieces, comm)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, reduce: Combine) -> None:
    """Leave in `out` the reduction of all ranks' chunk number `comm.rank`; `out` may be this chunk
    itself.
    """
    for *pieces, of_out in segments([*chunks, out]):
        ring_reduce_scatter(pieces, of_out, comm, reduce, kept_room(pieces, comm))


def kept_room(chunks: list[Array], comm: Communicator) -> Callable[[Array], Array]:
    """Return a `room` that takes two temporaries in turn: one receives a chunk while the other is
    sent.
    """
    longest, slots = max(map(len, chunks)), cycle((1, 0))
    return lambda chunk: temporary(comm, chunk, longest, next(slots))[: len(chunk)]
