"""Lesson 03: collectives in few rounds, straight to their owners, and over machines of machines.

    broadcast from 0, 8 ranks     round 1: 0→4        round 2: 0→2 4→6        round 3: 0→1 2→3 4→5 6→7

Fill in the seven functions; their docstrings are the contract. You need numpy, `comm.rank`, `comm.size`, and lesson
01's `comm.send`, `comm.recv` and `comm.exchange(outgoing, to, incoming, source)`. For task 4, and for it alone, you may
call lesson 02's ring:

    ring.ring_reduce_scatter(chunks, out, comm, np.add)    out, for which pass chunks[comm.rank], becomes its sum
    ring.ring_all_reduce(array, comm, np.add)              array becomes the sum of all ranks' arrays, in place
    ring.ring_all_gather(chunks, comm)                     fills in every chunk from the rank of its number

`chunks` are one-dimensional arrays, one for each rank of `comm`; parts of one buffer will do. In the other tasks the
package's collectives, MPI's own (`comm.native`) and, in task 5, modelled clusters score nothing. All arrays are of any
dtype, the same on all ranks, and so is all that travels. Wait for every request; call no barrier.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 03             points, and what is still wrong
"""

from __future__ import annotations

from typing import Any

import numpy as np

import minidist
from minidist import Communicator
from minidist.collectives import ring  # noqa: F401  # for task 4

Array = np.ndarray[Any, Any]


def tree_broadcast(buffer: Array, root: int, comm: Communicator) -> None:
    """Task 1: copy the root's buffer into everybody's, in place, in ceil(log2 P) rounds.

    In each round everybody who has the data sends it to one rank that lacks it, so who has it doubles. Any number of
    ranks, any root: count from the root, number = (rank - root) % P.

    Parameters
    ----------
    buffer : one-dimensional array
        As long on every rank; only the root's holds data.
    root : int
        Any rank, the same on all.

    Messages
    --------
    P - 1 in all, each of the whole buffer, one to every rank but the root. Rounds are numbered from 1. The root sends
    its first message in round 1, its second in round 2, and so on. A rank that got the data in round k sends its first
    message in round k + 1. The last round is number ceil(log2 P). (Which rank sends to which is up to you.)
    """
    raise NotImplementedError("task 1 is not started")


def halving_doubling(buffer: Array, comm: Communicator) -> None:
    """Task 2: replace every rank's buffer by the sum of all, in place: halve, then double.

    Let Q be the largest power of two that is at most P. Ranks from Q on first send their whole buffer: rank r to rank
    r - Q, which adds it. Then the ranks below Q halve and double, while the others wait. In the end rank r - Q sends
    the result to rank r.

    Halving: Q ranks work on Q chunks, cut as `numpy.array_split(buffer, Q)` does. Exchange with the rank at distance
    Q/2 (`rank ^ (Q // 2)`): the lower one keeps the first half of the chunks, gives away the second, and adds what
    comes; the upper one the other way round. Then the same within each half, at distance Q/4, ..., 1. In the end rank r
    has the sum of chunk r. Doubling: back again, distances 1, 2, ..., Q/2, exchanging what is complete.

    Parameters
    ----------
    buffer : one-dimensional array
        As long on every rank. Any length, also shorter than P, or 0.

    Messages
    --------
    2 log2 Q from each rank below Q, of n/2, n/4, ..., n/Q and n/Q, ..., n/2 bytes, if Q divides the length. Besides,
    one of n bytes from each rank from Q on, and one of n bytes back to it. (A message of length 0 may be left out.)
    """
    raise NotImplementedError("task 2 is not started")


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Task 3: copy `leaving[j]` of rank i into `arriving[i]` of rank j, for all i and j.

    P - 1 steps. In each, every rank sends one chunk, straight to its owner, and every rank receives one: nobody is sent
    to by two in the same step.

    Parameters
    ----------
    leaving, arriving : lists of one-dimensional arrays
        P each, of any lengths from 1 on. `arriving[i]` of rank j is as long as `leaving[j]` of rank i. What a rank has
        for itself (`leaving[comm.rank]`) is copied, not sent. `leaving` must stay as it is. Write into the arrays of
        `arriving`; the list keeps its entries.

    Messages
    --------
    P - 1 from each rank, one chunk each, each to another rank.
    """
    raise NotImplementedError("task 3 is not started")


def hierarchical_all_reduce(buffer: Array, inside: Communicator, across: Communicator) -> None:
    """Task 4: replace every rank's buffer by the sum over all ranks of all nodes, in place; little crosses nodes.

        node 0   rank 0 ─┐ inside        across: ranks 0 and 3, ranks 1 and 4, ranks 2 and 5
                 rank 1 ─┤
                 rank 2 ─┘               inside each node   reduce-scatter: GPU i holds shard i of its node's sum
        node 1   rank 3 ─┐ inside        across nodes       all-reduce of shard i among the GPUs i
                 rank 4 ─┤               inside each node   all-gather
                 rank 5 ─┘

    Parameters
    ----------
    buffer : one-dimensional array
        As long on every rank, of any length.
    inside, across : Communicator
        The G ranks of this rank's node, and the N ranks that have the same number in their nodes. All nodes are alike.

    Messages
    --------
    With lesson 02's ring on both levels: inside 2 (G - 1) from each rank, across 2 (N - 1). Between nodes each rank
    sends 2 (N - 1)/N · n/G bytes, if N G divides the length.
    """
    raise NotImplementedError("task 4 is not started")


def halving_doubling_cost(bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Task 5a: return the seconds that task 2 takes, on any number of ranks.

    Parameters
    ----------
    bytes : float
        The size of the buffer; Q, the largest power of two that is at most `ranks`, divides it.
    ranks : int
        At least 1. A rank alone takes no time.
    latency, bandwidth : float
        A message takes latency + bytes/bandwidth: seconds, and bytes per second. A rank can send and receive at the
        same time, both at full bandwidth. Adding is free.

    The grader asks a virtual clock, as the text does.
    """
    raise NotImplementedError("task 5 is not started")


def two_level_cost(
    bytes: float, nodes: int, per_node: int, inside: tuple[float, float], across: tuple[float, float]
) -> float:
    """Task 5b: return the seconds that task 4 takes, with lesson 02's ring on both levels.

    Parameters
    ----------
    bytes : float
        The size of the buffer; the number of all ranks divides it.
    nodes, per_node : int
        N nodes of G ranks; either may be 1.
    inside, across : (float, float)
        Latency and bandwidth between two ranks of a node, and between two ranks of different nodes.
    """
    raise NotImplementedError("task 5 is not started")


def broadcast_crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Task 5c: return from how many bytes on a broadcast in parts is faster than task 1; `math.inf` if it never is.

    In parts: the root cuts the buffer into P equal chunks and scatters them along task 1's tree. A message holds the
    chunks of all ranks that are reached through its receiver: n/2 bytes, then n/4, ..., at last n/P. Then lesson 02's
    ring all-gathers the chunks.

    Parameters
    ----------
    ranks : int
        A power of two, 2 at least.
    latency, bandwidth : float
        As in task 5a.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    per_node = 2 if comm.size % 2 == 0 else 1
    inside, across = comm.split(comm.rank // per_node), comm.split(comm.rank % per_node)

    def task_1() -> str:
        buffer = np.arange(3.0) if comm.rank == comm.size - 1 else np.zeros(3)
        tree_broadcast(buffer, comm.size - 1, comm)
        return f"the last rank's buffer is {buffer}"

    def task_2() -> str:
        buffer = np.arange(5.0) + comm.rank
        halving_doubling(buffer, comm)
        return f"the sum of all buffers is {buffer}"

    def task_3() -> str:
        leaving = [np.array([10.0 * comm.rank + to]) for to in range(comm.size)]
        arriving = [np.zeros(1) for _ in range(comm.size)]
        all_to_all(leaving, arriving, comm)
        return f"what came is {np.concatenate(arriving)}"

    def task_4() -> str:
        buffer = np.arange(5.0) + comm.rank
        hierarchical_all_reduce(buffer, inside, across)
        return f"the sum of all buffers is {buffer}, over {across.size} nodes of {inside.size}"

    def task_5() -> str:
        slow, fast = (1e-5, 1e9), (2e-6, 1e10)
        one = [f"{1e6 * halving_doubling_cost(8000, ranks, *slow):.0f}" for ranks in (4, 6, 8)]
        two = f"{1e6 * two_level_cost(8000, 2, 4, fast, slow):.0f}"
        return (
            f"8000 bytes take {', '.join(one)} microseconds on 4, 6 and 8 ranks, {two} on 2 nodes of 4; a broadcast on "
            f"8 ranks is faster in parts from {broadcast_crossover(8, *slow):.0f} bytes on"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
