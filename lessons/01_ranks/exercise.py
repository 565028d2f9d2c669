"""Lesson 01: programs of several ranks, from sends and receives.

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ──▶ rank 0

Fill in the five functions; their docstrings are the contract. You need numpy and

    comm.rank, comm.size                                  who am I, and how many are there
    comm.send(buffer, to, tag=0)                          may wait for its receive: count on it that it does
    comm.recv(buffer, source, tag=0)                      fills a buffer of exactly the message's size
    comm.exchange(outgoing, to, incoming, source, tag=0)  a send and a receive, both posted before either is waited for
    comm.isend(...), comm.irecv(...)                      return a request at once; each ends with request.wait()

What you send, and what you receive into, must be contiguous: of a one-dimensional array `a`, a[2:5] is, a[::2] is not.
All arrays that you are given are, and so is what `work` returns. They are of any dtype, unless a docstring says which.
Nobody sends to himself. Messages of one tag from one rank to another arrive in the order they were sent. The grader
compares every message with what the docstring says, so no collective will do, and no barrier.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 01             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import minidist
from minidist import Communicator

Array = np.ndarray[Any, Any]
Plan = list[tuple[str, int]]


def pass_token(own: Array, comm: Communicator) -> Array:
    """Task 1: send a token once round the ring; every rank adds its `own` to it.

    The token starts on rank 0 as a copy of rank 0's `own`, goes to rank 1, 2, ..., and from the last rank home to rank
    0. A rank that receives it adds its `own` and passes it on; rank 0 adds nothing when it comes home.

    Parameters
    ----------
    own : one-dimensional array
        As long on every rank, and of one dtype. It must stay as it is.

    Returns
    -------
    array
        On rank r > 0 the token as it left this rank: own of rank 0 + ... + own of rank r. On rank 0 the token as it
        came home: the sum of all. With one rank, a copy of `own`.

    Messages
    --------
    One from every rank, of the token's size, to its right neighbour. With one rank none.
    """
    raise NotImplementedError("task 1 is not started")


def halo(piece: Array, width: int, comm: Communicator) -> Array:
    """Task 2: return this rank's piece of a ring-shaped array, with `width` elements of its neighbours at both ends.

        rank 0 [a b c]   rank 1 [d e f g]   rank 2 [h i]       width 1: rank 1 returns [c d e f g h]
                                                               and rank 0 [i a b c d]: the ends are neighbours

    Parameters
    ----------
    piece : one-dimensional array
        Of at least `width` elements; every rank's may have another length. All are of one dtype, and so is what is
        returned. It must stay as it is.
    width : int
        At least 1, the same on all ranks.

    Messages
    --------
    Two from every rank, of `width` elements each: its last elements to the right neighbour, its first ones to the left
    neighbour. With two ranks those are one and the same rank, and still two messages. With one rank none: a piece is
    then its own neighbour on both sides.
    """
    raise NotImplementedError("task 2 is not started")


def chain_broadcast(buffer: Array, root: int, pieces: int, comm: Communicator) -> None:
    """Task 3: copy the root's buffer into everybody's, in place, along the chain root, root + 1, ..., root - 1.

    Cut the buffer as `numpy.array_split(buffer, pieces)` does, and send piece after piece. A rank passes a piece on
    before it waits for the next one; so a long chain works on several pieces at once. (A loop of `recv` and `send` does
    that. To post the receives ahead is faster, and not asked for.) When this returns, nothing is under way any more.

    Parameters
    ----------
    buffer : one-dimensional array
        As long on every rank; only the root's holds data.
    root : int
        Any rank, the same on all.
    pieces : int
        At least 1, at most the buffer's length.

    Messages
    --------
    From every rank, except the last of the chain: one for each piece, in order, to the right neighbour. The last of the
    chain is the root's left neighbour and sends nothing.
    """
    raise NotImplementedError("task 3 is not started")


def farm(
    rows: Array | None, shape: tuple[int, int], work: Callable[[Array], Array], comm: Communicator
) -> Array | None:
    """Task 4: rank 0, the master, deals out rows; the other ranks, the workers, return `work(row)` of each.

    With P > 1 ranks, row i goes to worker 1 + i % (P - 1); a rank alone does all rows itself. The master gives every
    worker its first row (as far as there are rows) before it waits for any result: otherwise only one worker works at a
    time.

    Parameters
    ----------
    rows : array of `shape`, float64, or None
        The rows on rank 0, None elsewhere.
    shape : (int, int)
        How many rows there are (perhaps 0, perhaps fewer than workers), and their width: all ranks are told.
    work : function
        Takes a row, returns one of the same width, float64. Called by workers, once for each row; the master calls it
        only if there is no other rank, once for each row as well.

    Returns
    -------
    array of `shape`, or None
        On rank 0 the results, result i in row i, also if there are none. None elsewhere.

    Messages
    --------
    One from rank 0 for each row, one back for each result, each of one row. Nothing else: both ends know from `shape`
    how many will come.
    """
    raise NotImplementedError("task 4 is not started")


def who_never_finishes(plans: list[Plan]) -> list[int]:
    """Task 5: return the ranks that never come to the end of their plan, in order, without running it.

    A plan lists what a rank does: `("send", to)` or `("recv", source)`, one after the other. Each of them blocks until
    the other end is there: a send is complete when `to` has come to the receive that belongs to it, and the other way
    round. So a message needs its sender at `("send", r)` and rank r at `("recv", sender)` at the same time; then both
    go on to their next line.

    Parameters
    ----------
    plans : list
        `plans[r]` is the plan of rank r, possibly empty. It names other ranks of `plans` only. Plans need not fit each
        other: a line may have no counterpart, and is then never complete. You may change the lists.

    Examples
    --------
    >>> who_never_finishes([[("send", 1), ("recv", 1)], [("send", 0), ("recv", 0)]])
    [0, 1]
    >>> who_never_finishes([[("send", 1), ("recv", 1)], [("recv", 0), ("send", 0)], [("recv", 0)]])
    [2]
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        return f"the token came home with {pass_token(np.array([1.0, comm.rank]), comm)}"

    def task_2() -> str:
        return f"with its neighbours' ends, rank 0 has {halo(10.0 * comm.rank + np.arange(3), 1, comm)}"

    def task_3() -> str:
        buffer = np.arange(5.0) if comm.rank == comm.size - 1 else np.zeros(5)
        chain_broadcast(buffer, comm.size - 1, 3, comm)
        return f"the last rank's buffer is {buffer}"

    def task_4() -> str:
        rows = np.arange(10.0).reshape(5, 2) if comm.rank == 0 else None
        results = farm(rows, (5, 2), lambda row: row**2, comm)
        return f"the squares are {None if results is None else results.tolist()}"

    def task_5() -> str:
        plans = [[("send", (rank + 1) % 3), ("recv", (rank - 1) % 3)] for rank in range(3)]
        return f"if all send first, these never finish: {who_never_finishes(plans)}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
