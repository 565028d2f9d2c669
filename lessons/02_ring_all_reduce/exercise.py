"""Lesson 02: an all-reduce from sends and receives, around a ring.

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ──▶ rank 0

Every rank sends only to its right neighbour and receives only from its left neighbour. Fill in the
four functions; their docstrings are the contract. You need numpy, `comm.rank`, `comm.size` and
`comm.exchange(...)` (or `isend` and `irecv`; wait for their requests). Chunks and buffers may have
any dtype, the same on all ranks. Sums and messages have this dtype, too. The messages keep the
ranks in step, so you need no barrier. You are building what the package's collectives and MPI's own
(`comm.native`) do, so calling them scores nothing.

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
    """Task 1: return the sum, over all ranks, of chunk number `comm.rank`, as a new array.

    Parameters
    ----------
    chunks : list of one-dimensional arrays
        One chunk for each rank, `comm.size` in all. Chunk i has the same length on every rank.
        Different chunks may have different lengths, and some may have length 0. Do not change the
        list or its arrays, and return none of them (also not with P = 1).

    Messages
    --------
    Every rank sends P - 1 messages, all to its right neighbour, one chunk each. It sends every
    chunk except the one whose sum it returns. (You may leave out messages of length 0.) With P = 1
    nothing is sent.
    """
    raise NotImplementedError("task 1 is not started")


def ring_all_gather(chunks: list[Array], comm: Communicator) -> None:
    """Task 2: on every rank, fill in every chunk i with the data of rank i, its owner. Return
    nothing.

    Parameters
    ----------
    chunks : list of one-dimensional arrays
        One chunk for each rank, of the same lengths on all ranks. At the call, only chunk number
        `comm.rank` holds data. At the return, all chunks do, on every rank. Write into these
        arrays; the list keeps its entries.

    Messages
    --------
    Every rank sends P - 1 messages, all to its right neighbour, one chunk each: first its own
    chunk, then always the chunk that it received last. The only chunk that a rank never sends is
    its right neighbour's own; it receives this one last. (You may leave out messages of length 0.)
    """
    raise NotImplementedError("task 2 is not started")


def ring_all_reduce(buffer: Array, comm: Communicator) -> None:
    """Task 3: replace every rank's buffer by the sum of all ranks' buffers, in place, with tasks 1
    and 2.

    Parameters
    ----------
    buffer : one-dimensional array
        It has the same length on every rank. Cut it as `numpy.array_split(buffer, comm.size)` does:
        the length need not be a multiple of the number of ranks, and it may be smaller than that
        number, or 0.

    Messages
    --------
    Every rank sends 2(P - 1), all to its right neighbour, one chunk each. (You may leave out
    messages of length 0.)
    """
    raise NotImplementedError("task 3 is not started")


def all_reduce_cost(elements: int, itemsize: int, ranks: int, rank: int) -> tuple[int, int]:
    """Task 4: return (messages, bytes) that `rank` sends in a ring all-reduce, exactly, without
    running one.

    Parameters
    ----------
    elements, itemsize : int
        The length of the buffer, and the bytes of one element.
    ranks, rank : int
        The number of ranks, and the rank whose messages are counted. Messages of length 0 count
        here, although you may leave them out in tasks 1 to 3.
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
        chunks = [
            np.full(length, float(comm.rank) if i == comm.rank else np.nan)
            for i, length in enumerate(lengths)
        ]
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
