"""Lesson 02, solved by hand from the handout: an all-reduce from sends and receives, around a
ring.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidist import Communicator

Array = np.ndarray[Any, Any]


def ring_reduce_scatter(chunks: list[Array], comm: Communicator) -> Array:
    """Task 1: return the sum, over all ranks, of chunk number `comm.rank`."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # the chunk that has the longest way to go: it ends on the left neighbour
    partial = chunks[left].copy()
    for step in range(comm.size - 1):
        own = chunks[(comm.rank - step - 2) % comm.size]
        arriving = np.empty_like(own)
        comm.exchange(partial, right, arriving, left)
        arriving += own
        partial = arriving
    return partial


def ring_all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Task 2: fill in every chunk from the rank that owns it."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        leaving, arriving = (
            chunks[(comm.rank - step) % comm.size],
            chunks[(comm.rank - step - 1) % comm.size],
        )
        comm.exchange(leaving, right, arriving, left)


def ring_all_reduce(buffer: Array, comm: Communicator) -> None:
    """Task 3: replace every rank's buffer by the sum of all ranks' buffers, in place, with tasks 1
    and 2.
    """
    # views: what is written into them is written into the buffer
    chunks = np.array_split(buffer, comm.size)
    chunks[comm.rank][:] = ring_reduce_scatter(chunks, comm)
    ring_all_gather(chunks, comm)


def all_reduce_cost(elements: int, itemsize: int, ranks: int, rank: int) -> tuple[int, int]:
    """Task 4: return (messages, bytes) that `rank` sends in a ring all-reduce, exactly, without
    running one.
    """
    each, longer = divmod(elements, ranks)
    lengths = [each + 1 if chunk < longer else each for chunk in range(ranks)]
    # its own sum at first, then its right neighbour's
    never_sent = lengths[rank] + lengths[(rank + 1) % ranks]
    return 2 * (ranks - 1), (2 * elements - never_sent) * itemsize
