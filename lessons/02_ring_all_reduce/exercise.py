"""Lesson 02: an all-reduce from sends and receives, around a ring.

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ──▶ rank 0

Every rank sends only to its right neighbour and receives only from its left one. Fill in the four functions; their
docstrings are the contract. You need numpy, `comm.rank`, `comm.size` and `comm.exchange(...)` (or `isend` and `irecv`,
whose requests you wait for). Chunks and buffers are of any dtype, the same on all ranks: sums and messages are of that
dtype, too. The messages keep the ranks in step, so no barrier is needed. The package's collectives and MPI's own
(`comm.native`) are what you are building: calling them scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 02             points, and what is still wrong
"""

from __future__ import annotations

from typing import Any

import numpy as np

import minidist
from minidist import Communicator

Array = np.ndarray[Any, Any]


def ring_reduce_scatter(chunks: list[Array], comm: Communicator) -> Array:
    """Task 1: return the sum, over all ranks, of chunk number `comm.rank`, in an array of its own.

    Parameters
    ----------
    chunks : list of one-dimensional arrays
        One chunk per rank, `comm.size` in all. Chunk i is as long on every rank; lengths of different chunks may
        differ, and some may be 0. The list and its arrays must stay as they are. (What is returned is none of them,
        with P = 1 either.)

    Messages
    --------
    P - 1 from every rank, all to the right neighbour, one chunk each. The chunk that a rank ends up with is the only
    one that it never sends. (A message of length 0 may be left out.) With P = 1 nothing is sent.
    """
    raise NotImplementedError("task 1 is not started")


def ring_all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Task 2: fill in every chunk from the rank that owns it.

    Parameters
    ----------
    chunks : list of one-dimensional arrays
        One per rank, of the same lengths on all ranks. When called, only chunk number `comm.rank` holds data; when this
        returns, all do, on every rank. Write into these arrays; the list keeps its entries.

    Messages
    --------
    P - 1 from every rank, all to the right neighbour, one chunk each: first its own, then always what came last. The
    only chunk that a rank never sends is its right neighbour's own, which comes to it last. (A message of length 0 may
    be left out.)
    """
    raise NotImplementedError("task 2 is not started")


def ring_all_reduce(buffer: Array, comm: Communicator) -> None:
    """Task 3: replace every rank's buffer by the sum of all ranks' buffers, in place, with tasks 1 and 2.

    Parameters
    ----------
    buffer : one-dimensional array
        As long on every rank. Cut it as `numpy.array_split(buffer, comm.size)` does: its length need not be a multiple
        of the rank count, and may be smaller than it, or 0.

    Messages
    --------
    2(P - 1) from every rank, all to the right neighbour, one chunk each. (A message of length 0 may be left out.)
    """
    raise NotImplementedError("task 3 is not started")


def all_reduce_cost(elements: int, itemsize: int, ranks: int, rank: int) -> tuple[int, int]:
    """Task 4: return (messages, bytes) that `rank` sends in a ring all-reduce, exactly, without running one.

    Parameters
    ----------
    elements, itemsize : int
        The length of the buffer, and the bytes of one element.
    ranks, rank : int
        How many ranks there are, and which one is asked about. Here messages of length 0 count as messages, although
        tasks 1 to 3 may leave them out.
    """
    raise NotImplementedError("task 4 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    lengths = [2] * comm.size

    def task_1() -> str:
        chunks = [np.full(2, 10.0 * i + comm.rank) for i in range(comm.size)]
        return f"the sum of chunk {comm.rank} is {ring_reduce_scatter(chunks, comm)}"

    def task_2() -> str:
        chunks = [np.full(length, float(comm.rank) if i == comm.rank else np.nan) for i, length in enumerate(lengths)]
        ring_all_gather(chunks, comm)
        return f"the chunks are {np.concatenate(chunks)}"

    def task_3() -> str:
        buffer = np.arange(5.0) + comm.rank
        ring_all_reduce(buffer, comm)
        return f"the sum of all buffers is {buffer}"

    def task_4() -> str:
        return f"(messages, bytes) of 10 doubles: {all_reduce_cost(10, 8, comm.size, comm.rank)}"

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
