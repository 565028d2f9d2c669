"""The ring of `minidist/ring.py` for large buffers: it works in segments, and messages arrive in reused
memory.

a buffer of P chunks   │ c0 ......│ c1 ......│ c2 ......│       a segment is a piece of every chunk, of a megabyte:
segment 1              │ ■■       │ ■■       │ ■■       │       it is still in the cache when it is added and
segment 2              │   ■■     │   ■■     │   ■■     │       sent on
"""

from minidist.full.collectives.fast import cut, segments, temporary
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.buffers import Array, Chunks
from minidist.full.comm.communicator import Communicator
from minidist.ring import ring_all_gather


def all_reduce(array: Array, comm: Communicator, reduce: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    for pieces in segments(Chunks(array, cut(len(array), comm.size))):
        reduce_pieces(pieces, pieces[comm.rank], comm, reduce)
        ring_all_gather(pieces, comm)


def reduce_scatter(chunks: list[Array], out: Array, comm: Communicator, reduce: Combine) -> None:
    """Leave in `out` the reduction of all ranks' chunk number `comm.rank`.

    `out` may be this chunk itself, and must be it if there is one rank.
    """
    for *pieces, of_out in segments([*chunks, out]):
        reduce_pieces(pieces, of_out, comm, reduce)


def reduce_pieces(chunks: list[Array], out: Array, comm: Communicator, reduce: Combine) -> None:
    """Do `ring_reduce_scatter` in two temporaries: one receives while the other is sent."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    longest = max(map(len, chunks))
    leaving = chunks[left]  # holds this rank's own part only
    rooms = [temporary(comm, leaving, longest, slot) for slot in range(min(2, comm.size - 1))]
    for step in range(1, comm.size):
        own = chunks[(comm.rank - step - 1) % comm.size]
        arriving = rooms[step % len(rooms)]
        if len(own) < longest:
            arriving = arriving[: len(own)]
        comm.exchange(leaving, right, arriving, left)
        # the last sum is complete and leaves no more
        leaving = arriving if step < comm.size - 1 else out
        reduce(arriving, own, leaving)
