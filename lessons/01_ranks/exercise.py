"""Lesson 01: programs of several ranks, from sends and receives.

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ──▶ rank 0

Fill in the five functions; their docstrings are the contract. You need numpy and

    comm.rank, comm.size                                  who am I, and how many are there
    comm.send(buffer, to, tag=0)                          may wait until the other rank receives: expect that it does
    comm.recv(buffer, source, tag=0)                      fills a buffer of exactly the message's size
    comm.exchange(outgoing, to, incoming, source, tag=0)  a send and a receive, both posted before either is waited for
    comm.isend(...), comm.irecv(...)                      return a request at once; each ends with request.wait()

Arrays that you send or receive into must be contiguous: of a one-dimensional array `a`, a[2:5] is
contiguous, a[::2] is not. All arrays that you are given are contiguous, and so is the array that
`work` returns. They may have any dtype, unless a docstring says which. No rank sends to itself.
Messages with one tag from one rank to another arrive in the order in which they were sent. The
grader compares every message with the docstring, so use no collective and no barrier.

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

    The token starts on rank 0 as a copy of rank 0's `own`. It goes to rank 1, 2, ..., and comes
    home to rank 0 from the last rank. Every rank that receives it adds its `own` and passes it on,
    except rank 0, which adds nothing when the token comes home.

    Parameters
    ----------
    own : one-dimensional array
        It has the same length and the same dtype on every rank. Do not change it.

    Returns
    -------
    array
        On rank r > 0, the token as this rank sent it on: own of rank 0 + ... + own of rank r. On
        rank 0, the token as it came back: the sum over all ranks. With one rank, a copy of `own`.

    Messages
    --------
    Every rank sends one message, of the token's size, to its right neighbour. With one rank, none.
    """
    raise NotImplementedError("task 1 is not started")


def halo(piece: Array, width: int, comm: Communicator) -> Array:
    """Task 2: return this rank's piece of a ring-shaped array, with `width` elements of its
    neighbours at both ends.

        rank 0 [a b c]   rank 1 [d e f g]   rank 2 [h i]

        width 1: rank 1 returns [c d e f g h], and rank 0 [i a b c d], because the ends are neighbours

    Parameters
    ----------
    piece : one-dimensional array
        It has at least `width` elements; its length may differ from rank to rank. All pieces have
        one dtype, and the array that you return has the same. Do not change `piece`.
    width : int
        At least 1, the same on all ranks.

    Messages
    --------
    Every rank sends two, of `width` elements each: its last elements to the right neighbour, its
    first elements to the left neighbour. With two ranks both neighbours are the same rank, and
    there are still two messages. With one rank there are none: the piece is then its own neighbour
    on both sides.
    """
    raise NotImplementedError("task 2 is not started")


def chain_broadcast(buffer: Array, root: int, pieces: int, comm: Communicator) -> None:
    """Task 3: copy the root's buffer into every rank's `buffer`, along the chain root, root + 1,
    ..., root - 1 (modulo P).

    Cut the buffer as `numpy.array_split(buffer, pieces)` does, and send one piece after the other.
    A rank passes a piece on before it waits for the next one, so a long chain works on several
    pieces at once. (A loop of `recv` and `send` does that. It would be faster to post the receives
    ahead; the task does not ask for this.) When the function returns, no message is under way.

    Parameters
    ----------
    buffer : one-dimensional array
        It has the same length on every rank; only the root's holds data. Write into it; return
        nothing.
    root : int
        The number of the root, the same on all ranks.
    pieces : int
        At least 1, at most the buffer's length.

    Messages
    --------
    Every rank except the last of the chain sends one message for each piece, in order, to its right
    neighbour. The last rank of the chain, the root's left neighbour, sends nothing.
    """
    raise NotImplementedError("task 3 is not started")


def farm(
    rows: Array | None, shape: tuple[int, int], work: Callable[[Array], Array], comm: Communicator
) -> Array | None:
    """Task 4: rank 0, the master, sends each row to a worker; the other ranks, the workers, send
    back `work(row)`.

    With P > 1 ranks, row i goes to rank 1 + i % (P - 1). With one rank, rank 0 does all rows
    itself. The master sends every worker its first row (as far as there are rows) before it waits
    for any result. Otherwise only one worker works at a time.

    Parameters
    ----------
    rows : array of `shape`, float64, or None
        The rows on rank 0, None elsewhere.
    shape : (int, int)
        The number of rows (perhaps 0, perhaps fewer than there are workers), and their width; the
        same on all ranks.
    work : function
        It takes a row and returns a row of the same width, float64. The workers call it, once for
        each row. The master calls it only if it is the only rank, also once for each row.

    Returns
    -------
    array of `shape`, or None
        On rank 0 the results, result i in row i; an empty array of `shape` if there are no rows. On
        other ranks None.

    Messages
    --------
    Rank 0 sends one message for each row, and the worker sends one back for its result; each holds
    one row. Nothing else is sent: both sides know from `shape` how many messages will come.
    """
    raise NotImplementedError("task 4 is not started")


def who_never_finishes(plans: list[Plan]) -> list[int]:
    """Task 5: return a sorted list of the ranks that never reach the end of their plan; do not run
    the plans.

    A plan lists the calls of a rank, one after the other: `("send", to)` or `("recv", source)`.
    Each call blocks until the other rank has reached the call that matches it. So a message is
    transferred when its sender is at `("send", r)` and rank r is at `("recv", sender)` at the same
    time. Then both ranks go on to their next call.

    Parameters
    ----------
    plans : list
        `plans[r]` is the plan of rank r, possibly empty. It names only other ranks of `plans`. The
        plans need not match each other: a call may have no counterpart, and then it never ends. You
        may change the lists.

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
        return (
            "with its neighbours' ends, rank 0 has "
            f"{halo(10.0 * comm.rank + np.arange(3), 1, comm)}"
        )

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
