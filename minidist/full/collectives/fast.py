"""What makes the textbook algorithms fast, kept out of them: temporaries and segments.

Temporaries are allocated once per communicator: a fresh megabyte costs a page fault every 4 kB,
more time than adding it up. Large buffers travel in segments, so that a segment is still in the
cache when it is added and sent on.
"""

from collections.abc import Iterator
from typing import Any

from minidist.full.comm.buffers import (
    Array,
    device_name,
    dtype_name,
    empty,
)
from minidist.full.comm.communicator import Communicator

SEGMENT = 1 << 20  # bytes of one message of a long transfer: two of them fit a core's cache


class Temporaries(dict[tuple[int, str, str], Any]):
    """Arrays by slot, dtype and device."""


def temporary(
    comm: Communicator,
    like: Array,
    count: int,
    slot: int = 0,
) -> Array:
    """Return a reused array of `count` elements of the kind of `like`, with arbitrary contents.

    Two temporaries in use at the same time need different slots.
    """
    key = (slot, dtype_name(like), device_name(like))
    temporaries = comm.keep(Temporaries, Temporaries)
    found = temporaries.get(key)
    if found is None or len(found) < count:
        found = temporaries[key] = empty(like, count)
    return found if len(found) == count else found[:count]


def empty_like(array: Array) -> Array:
    """Return new memory for a flat array of this length and kind."""
    return empty(array, len(array))


def cut(length: int, parts: int) -> list[int]:
    """Return the lengths of `numpy.array_split`'s parts: as equal as possible, the longer ones
    first.
    """
    whole, rest = divmod(length, parts)
    longer = [whole + 1] * rest
    return longer + [whole] * (parts - rest)


def segments(chunks: list[Array], bytes: int = SEGMENT) -> Iterator[list[Array]]:
    """Cut each chunk into pieces of at most so many bytes, and yield piece k of every chunk
    together.

    Only the CPU's cache is meant: arrays elsewhere come in one piece.
    """
    longest = max(map(len, chunks))
    step = max(1, bytes // chunks[0].itemsize)
    if longest <= step or device_name(chunks[0]) != "cpu":
        yield chunks
        return
    for start in range(0, longest, step):
        yield [chunk[start : start + step] for chunk in chunks]


def blocks(array: Array, bytes: int = SEGMENT) -> Iterator[Array]:
    """Yield consecutive views of at most so many bytes; one of an empty array, too."""
    step = max(1, bytes // array.itemsize)
    for start in range(0, max(1, len(array)), step):
        yield array[start : start + step]
