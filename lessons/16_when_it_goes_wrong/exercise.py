"""Lesson 16: five tools that find the rank at fault.

    1  odd_ranks            which rank is about to make another call than the others?  compare one digest of each rank
    2  first_difference     which rank holds other weights, in which parameter?        a digest; more only if it differs
    3  waiting, straggler   which rank is slow?                                        it waits least for the others
    4  out_of_memory        which rank runs out of memory, in which category?          compare it with the median rank
    5  watch                which rank waits for which, and can they go on?            follow a chain to its end

Fill in the functions; their docstrings are the contract. You need numpy, hashlib, `comm.rank`,
`comm.size` and `comm.exchange(outgoing, to, incoming, source)` (or `isend` and `irecv`). The
package's collectives, `comm.all_gather_object` and MPI itself (`comm.native`) would do the work in one
line, so calling them scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 16             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import minidist
from minidist import Communicator
from minidist.full.trace import Event

Array: TypeAlias = np.ndarray[Any, Any]
# of one rank: (seconds, the bytes it holds by category)
Timeline: TypeAlias = list[tuple[float, dict[str, int]]]
# ("computes", -1, 0), ("finished", -1, 0) or ("waits", for rank, since when)
State: TypeAlias = tuple[str, int, float]
Look: TypeAlias = tuple[float, list[State]]  # the time now, and the state of every rank


def odd_ranks(words: str, comm: Communicator) -> list[int]:
    """Task 1: return the odd ranks: a sorted list of the ranks whose `words` differ from those that
    most ranks have.

    Each rank brings its own `words`. They say which collective the rank is about to call, for
    example "all_reduce(float32, 1000, sum)". The words that most ranks have are right. If several
    texts are equally frequent, the text of the lowest rank among them is right. Texts may have any
    length, and different lengths on different ranks. Every rank must return the same list; it is
    empty if all texts are equal.

    Messages
    --------
    Every rank sends P - 1 messages of 8 bytes each. A message is a digest of words: the same words
    must give the same digest in every process, and different words different digests, except by a
    rare chance. You choose to which ranks the messages go.
    """
    raise NotImplementedError("task 1 is not started")


def first_difference(arrays: dict[str, Array], comm: Communicator) -> tuple[str, list[int]] | None:
    """Task 2: return the name of the first array that is not the same on all ranks, and its odd
    ranks; or None.

    A training loop calls this after every step with the model's parameters, so it has to be cheap
    while all ranks have the same arrays. "First" means first in the order of `arrays`.

    Parameters
    ----------
    arrays : dict of name to array
        The names, their order, the shapes and the dtypes are the same on every rank. An array may
        be not contiguous, and its numbers may lie in memory in another order than on other ranks.

    Returns
    -------
    (name, ranks) or None
        Every rank returns the same. Two arrays are the same if all their *bits* are the same: NaN
        with the same bits on every rank is the same, 0.0 and -0.0 are not. `ranks` is the sorted
        list of the odd ranks for this one array, as in task 1: their array differs from the one
        that most ranks have; in a tie, the one of the lowest rank is right. None: all arrays are
        the same on all ranks.

    Messages
    --------
    Every rank sends P - 1 messages of 8 bytes each: a digest of all its arrays together. Only if
    these digests are not all equal, every rank sends P - 1 more messages; each has one digest of 8
    bytes for each array.
    """
    raise NotImplementedError("task 2 is not started")


def waiting(events: list[Event]) -> dict[int, float]:
    """Task 3, first half: return {rank: seconds}: how long the main track of each rank did nothing
    but communicate.

    An event has `rank`, `kind`, `track`, `start`, `end` and `waited_from`. An event counts if its
    kind is "send", "recv", "collective" or "wait", and its track is "main". (Events of other tracks
    run beside computing.) It counts from `waited_from` to `end`; if `waited_from` is None, from
    `start` to `end`.

    Events of a rank may overlap: a collective spans its messages, and messages overlap each other.
    Count each moment once. The dictionary has every rank that has any event, of whatever kind; a
    rank without communication has 0.
    """
    raise NotImplementedError("task 3 is not started")


def straggler(events: list[Event]) -> int | None:
    """Task 3, second half: return the slow rank, or None if no rank is slow.

    Take the seconds of `waiting`. The candidate is the rank that waits least; of several, the one
    with the lowest number. It is slow only if it waits less than half of the median of all ranks'
    seconds (`numpy.median`).
    """
    raise NotImplementedError("task 3 is not started")


def out_of_memory(timeline: Timeline, capacity: int, comm: Communicator) -> tuple[int, str] | None:
    """Task 4: return (rank, category): which rank runs out of memory, and which category is to
    blame; or None.

    Parameters
    ----------
    timeline : list of (seconds, bytes by category)
        This rank's samples, at least one. All samples of all ranks have the same five categories,
        in the same order.
    capacity : int
        The bytes that a rank may hold, the same for all.

    Every rank must return the same:

    1. The *peak* of a rank is its sample with the largest total over the five categories; of
       several, the first.
    2. The rank to return is the one whose peak has the largest total; of several, the lowest rank.
       If this total is not above `capacity`, return None.
    3. For each category, take the bytes that each rank holds at its own peak, and their median over
       all ranks (`numpy.median`). The category to blame is the one in which the returned rank is
       furthest above the median; of several, the first.

    Messages
    --------
    Every rank sends P - 1 messages of 40 bytes each: five numbers of type int64.
    """
    raise NotImplementedError("task 4 is not started")


def watch(
    look: Callable[[], Look], pause: Callable[[], None], limit: float
) -> tuple[str, list[int]] | None:
    """Task 5: look again and again at what the ranks do; return the first finding, or None when all
    have finished.

    `look()` returns (the time now, the states of all ranks). After each look, start a chain at each
    rank that waits, lowest rank first. The chain goes from a rank to the rank that it waits for,
    and from there to the rank that this one waits for. It ends at a rank that does not wait, or
    when it comes back to a rank that is already in the chain. The end of a chain gives its finding:

        comes back to a rank        ("deadlock", the ranks of the cycle in the chain's order, the lowest one first)
        ends at "finished"          ("gone", the whole chain, the finished rank last)
        ends at "computes"          ("slow", the whole chain, the computing rank last)

    Not every finding counts:

    - "slow" counts only if the rank where the chain begins has waited for more than `limit`
      seconds.
    - "deadlock" counts only if every rank of the cycle has exactly the same state (all three
      values) at this look and at the look before. Ranks that lead to the cycle do not matter.
    - "gone" counts only if every waiting rank of the chain has exactly the same state at this look
      and at the look before. The finished rank does not matter.

    The last two rules are needed because `look` asks the ranks one after the other: a message on
    its way may look like a wait that never ends.

    Return the finding of the first chain that counts. If no chain counts, and not all ranks have
    finished, call `pause()` and look again.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    last = comm.size - 1

    def task_1() -> str:
        return (
            "another call makes "
            f"{odd_ranks('all_reduce(8)' if comm.rank < last else 'broadcast(8)', comm)}"
        )

    def task_2() -> str:
        arrays = {
            "weight": np.arange(6.0),
            "bias": np.array([1.0, 2.0 if comm.rank < last else 2.5]),
        }
        return f"the first difference is {first_difference(arrays, comm)}"

    def task_3() -> str:
        events = [
            Event(rank, "collective", "all_reduce", 5.0 + (4 if rank == 2 else 0), 10.0)
            for rank in range(4)
        ]
        return f"waiting {waiting(events)}, the slow rank is {straggler(events)}"

    def task_4() -> str:
        usual = {
            "parameters": 10,
            "gradients": 10,
            "optimizer": 20,
            "activations": 30,
            "communication": 5,
        }
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
