"""Lesson 16: five tools that find the rank at fault.

    1  odd_ranks            who is about to make another call than the others?     one digest from each to each
    2  first_difference     who holds other weights, and in which parameter?       a digest; more only if it differs
    3  waiting, straggler   who is slow?                                           the one for whom all others wait
    4  out_of_memory        who runs out of memory, and with what?                 who exceeds the others, and in what
    5  watch                who waits for whom, and can it still end well?         a chain, and how it ends

Fill in the functions; their docstrings are the contract. You need numpy, hashlib, `comm.rank`, `comm.size` and
`comm.exchange(outgoing, to, incoming, source)` (or `isend` and `irecv`). The package's collectives, its roll call and
MPI's own (`comm.native`) would do it in a line: calling them scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 16             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import minidist
from minidist import Communicator
from minidist.trace import Event

Array: TypeAlias = np.ndarray[Any, Any]
Timeline: TypeAlias = list[tuple[float, dict[str, int]]]  # what a rank held from each moment on, by category
State: TypeAlias = tuple[str, int, float]  # ("computes", -1, 0), ("finished", -1, 0) or ("waits", for whom, since when)
Look: TypeAlias = tuple[float, list[State]]  # the time now, and the state of every rank


def odd_ranks(words: str, comm: Communicator) -> list[int]:
    """Task 1: return, on every rank alike, the ranks whose `words` are not those that most ranks have, sorted.

    The words say which collective a rank is about to call: "all_reduce(float32, 1000, sum)". Of two texts that equally
    many ranks have, the one of the lowest rank counts as right. The texts may be of any length, also different ones.

    Messages
    --------
    P - 1 from every rank, of 8 bytes each: a digest, which is the same for the same words in every process. Any two
    texts that differ must have different ones, as far as chance allows. To whom they go is up to you.
    """
    raise NotImplementedError("task 1 is not started")


def first_difference(arrays: dict[str, Array], comm: Communicator) -> tuple[str, list[int]] | None:
    """Task 2: return the first array that is not the same on all ranks, and on which ranks it is odd; or None.

    Called after every training step with the model's parameters, so it has to be cheap while all is well.

    Parameters
    ----------
    arrays : dict of name to array
        The same names, in the same order, of the same shapes and dtypes on every rank; perhaps not contiguous.

    Returns
    -------
    (name, ranks) or None
        The same on every rank. Arrays are the same if their *bits* are (not-a-number everywhere alike is the same, 0.0
        and -0.0 are not). The odd ranks are those of task 1: not what most have, and if there is a tie, what the
        lowest rank has is right.

    Messages
    --------
    P - 1 from every rank, of 8 bytes: a digest of everything. Only if these differ, P - 1 more from every rank, of 8
    bytes for each array.
    """
    raise NotImplementedError("task 2 is not started")


def waiting(events: list[Event]) -> dict[int, float]:
    """Task 3: return for each rank in how many seconds its main thread did nothing but communicate.

    An event has `rank`, `kind`, `track`, `start`, `end` and `waited_from`. It counts if its kind is "send", "recv",
    "exchange", "collective" or "wait", and its track is "main" (what other tracks do, lies beside computing). It counts
    from `waited_from`, or if that is None, from `start`; and up to `end`.

    Events nest, a collective spans its messages, and messages overlap each other: no moment counts twice. Every rank
    that has an event of any kind is in the answer.
    """
    raise NotImplementedError("task 3 is not started")


def straggler(events: list[Event]) -> int | None:
    """Task 3, continued: return the slow rank: the one that waits least, the lowest of several; or None.

    Some rank always waits least. It is slow if it waits less than half as long as the median of all ranks
    (`numpy.median`).
    """
    raise NotImplementedError("task 3 is not started")


def out_of_memory(timeline: Timeline, capacity: int, comm: Communicator) -> tuple[int, str] | None:
    """Task 4: return, on every rank alike, which rank runs out of memory, and the category that is to blame; or None.

    Parameters
    ----------
    timeline : list of (seconds, bytes by category)
        This rank's samples, one at least. All have the same five categories, in the same order, on every rank.
    capacity : int
        The bytes that a rank may hold, the same for all.

    A rank's *peak* is its first sample with the largest total. Of the ranks whose peak is above the capacity, the one
    with the largest peak is returned, the lowest of several. To blame is the category in which it holds, at its peak,
    most more than the median of all ranks at theirs (`numpy.median`; of several, the first).

    Messages
    --------
    P - 1 from every rank, of 40 bytes each: five numbers of type int64.
    """
    raise NotImplementedError("task 4 is not started")


def watch(look: Callable[[], Look], pause: Callable[[], None], limit: float) -> tuple[str, list[int]] | None:
    """Task 5: look again and again at what the ranks do; return the first finding, or None when all have finished.

    After a look, follow a chain from each rank that waits, lowest rank first: to the rank it waits for, from there to
    the one that *that* waits for, and so on, up to a rank that does not wait, or one that was in the chain before.

        it comes back to a rank     ("deadlock", the ranks of the cycle, the lowest one first)
        it ends in "finished"       ("gone", the whole chain, the finished rank last)
        it ends in "computes"       ("slow", the whole chain, the computing rank last): nothing wrong yet, unless the
                                    rank where the chain begins has waited for more than `limit` seconds

    Ranks are asked one after the other, so a message that is on its way may look like a wait that never ends. So
    "deadlock" (of the ranks in the cycle) and "gone" (of the ranks in the chain that wait) count only if each of these
    has exactly the same state at this look and at the one before.

    The first chain that counts is returned. If none does, call `pause()` and look again.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    last = comm.size - 1

    def task_1() -> str:
        return f"another call makes {odd_ranks('all_reduce(8)' if comm.rank < last else 'broadcast(8)', comm)}"

    def task_2() -> str:
        arrays = {"weight": np.arange(6.0), "bias": np.array([1.0, 2.0 if comm.rank < last else 2.5])}
        return f"the first difference is {first_difference(arrays, comm)}"

    def task_3() -> str:
        events = [Event(rank, "collective", "all_reduce", 5.0 + (4 if rank == 2 else 0), 10.0) for rank in range(4)]
        return f"waiting {waiting(events)}, the slow rank is {straggler(events)}"

    def task_4() -> str:
        usual = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 30, "communication": 5}
        timeline = [(0.0, usual), (1.0, usual | {"activations": 60 if comm.rank == last else 30})]
        return f"out of memory is {out_of_memory(timeline, 100, comm)}"

    def task_5() -> str:
        looks = iter([(t, [("waits", 1, 0.0), ("waits", 0, 0.5)]) for t in (1.0, 2.0, 3.0)])
        return f"the finding is {watch(lambda: next(looks), lambda: None, 30.0)}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
