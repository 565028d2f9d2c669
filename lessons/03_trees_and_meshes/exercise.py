"""Lesson 03: collectives in few rounds (trees, halving and doubling), all-to-all, and collectives
on two levels.

    broadcast from 0, 8 ranks     round 1: 0→4        round 2: 0→2 4→6        round 3: 0→1 2→3 4→5 6→7

Fill in the seven functions; their docstrings are the contract. You need numpy, `comm.rank`,
`comm.size`, and lesson 01's `comm.send`, `comm.recv` and `comm.exchange(outgoing, to, incoming,
source)`. For task 4, and for it alone, you may call lesson 02's ring:

    ring.ring_reduce_scatter(chunks, comm, iadd)   returns the sum of chunks[comm.rank]; the chunks stay as they are
    ring.ring_all_reduce(chunks, comm, iadd)       every chunk becomes the sum of all ranks', in place
    ring.ring_all_gather(chunks, comm)             fills in every chunk from the rank of its number

`chunks` are one-dimensional arrays, one for each rank of `comm`; they may be views of one buffer.
In the other tasks, an answer that calls the package's collectives or MPI's own (`comm.native`)
scores nothing; in task 5, the same holds for modelled clusters. Arrays may have any dtype, the same
on all ranks, and messages have this dtype, too. Wait for every request; call no barrier.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 03             points, and what is still wrong
"""

from __future__ import annotations

from operator import iadd  # noqa: F401  # for task 4
from typing import Any

import numpy as np

import minidist
from minidist import (
    Communicator,
    ring,  # noqa: F401  # for task 4
)

Array = np.ndarray[Any, Any]


def tree_broadcast(buffer: Array, root: int, comm: Communicator) -> None:
    """Task 1: copy the root's buffer into every rank's `buffer`, in place, in ceil(log2 P) rounds.

    In each round, every rank that has the data sends it to one rank that does not have it yet. So
    the number of ranks that have the data doubles. The function must work for any number of ranks
    and any root: count from the root, number = (rank - root) % P.

    Parameters
    ----------
    buffer : one-dimensional array
        Of the same length on every rank; only the root's holds data.
    root : int
        The number of the root, the same on all ranks.

    Messages
    --------
    P - 1 in all, each of the whole buffer: one to every rank except the root. Rounds are numbered
    from 1. The root sends its first message in round 1, its second in round 2, and so on. A rank
    that receives the data in round k sends its first message in round k + 1. The last round is
    number ceil(log2 P). (You choose which rank sends to which.)
    """
    raise NotImplementedError("task 1 is not started")


def halving_doubling(buffer: Array, comm: Communicator) -> None:
    """Task 2: replace every rank's buffer by the sum of all ranks' buffers, in place: halve, then
    double.

    Let Q be the largest power of two that is at most P. First, each rank r from Q on sends its
    whole buffer to rank r - Q, which adds it to its own. Then the ranks below Q halve and double,
    while the others wait. In the end rank r - Q sends the result to rank r.

    Halving: Q ranks work on Q chunks, cut as `numpy.array_split(buffer, Q)` does. First each rank
    exchanges with the rank at distance Q/2 (`rank ^ (Q // 2)`). The lower rank of the two sends the
    second half of the chunks, receives the first half of the upper rank, and adds it to its own
    first half. The upper rank does the opposite: it sends its first half and adds what it receives
    to its second half. Then the ranks do the same within each half at the distances Q/4, ..., 1. In
    the end rank r has the sum of chunk r.

    Doubling: at the distances 1, 2, ..., Q/2 the same pairs of ranks exchange the chunks whose sums
    they have.

    Parameters
    ----------
    buffer : one-dimensional array
        Of the same length on every rank. The length may be anything, also smaller than P, or 0.

    Messages
    --------
    Each rank below Q sends 2 log2 Q messages, of n/2, n/4, ..., n/Q and then n/Q, ..., n/2 bytes,
    if Q divides the length. In addition, each rank from Q on sends one message of n bytes and
    receives one. (You may leave out messages of length 0.)
    """
    raise NotImplementedError("task 2 is not started")


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Task 3: copy `leaving[j]` of rank i into `arriving[i]` of rank j, for all i and j.

    There are P - 1 steps. In each step every rank sends one chunk directly to the rank that it is
    for, and every rank receives exactly one chunk.

    Parameters
    ----------
    leaving, arriving : lists of one-dimensional arrays
        P arrays in each list, of any lengths from 1 on. `arriving[i]` of rank j is as long as
        `leaving[j]` of rank i. A rank copies its own chunk, `leaving[comm.rank]`, and does not send
        it. Do not change `leaving`. Write into the arrays of `arriving`; the list keeps its
        entries.

    Messages
    --------
    Each rank sends P - 1 messages of one chunk each, one to each other rank.
    """
    raise NotImplementedError("task 3 is not started")


def hierarchical_all_reduce(buffer: Array, inside: Communicator, across: Communicator) -> None:
    """Task 4: replace every rank's buffer by the sum over all ranks of all nodes, in place, with
    few bytes between nodes.

        node 0   rank 0 ─┐ inside        across: ranks 0 and 3, ranks 1 and 4, ranks 2 and 5
                 rank 1 ─┤
                 rank 2 ─┘               inside each node   reduce-scatter: GPU i holds shard i of its node's sum
        node 1   rank 3 ─┐ inside        across nodes       all-reduce of shard i among the GPUs i
                 rank 4 ─┤               inside each node   all-gather
                 rank 5 ─┘

    Parameters
    ----------
    buffer : one-dimensional array
        Of any length, the same on every rank.
    inside, across : Communicator
        `inside` has the G ranks of this rank's node. `across` has the N ranks, one of each node,
        that have the same number in their nodes as this rank. All nodes have G ranks.

    Messages
    --------
    Use lesson 02's ring on both levels. Then each rank sends 2 (G - 1) messages inside its node and
    2 (N - 1) across. Between nodes each rank sends 2 (N - 1)/N · n/G bytes, if N G divides the
    length.
    """
    raise NotImplementedError("task 4 is not started")


def halving_doubling_cost(bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Task 5a: return the seconds that task 2 takes, on any number of ranks.

    Parameters
    ----------
    bytes : float
        The size of the buffer; Q, the largest power of two that is at most `ranks`, divides it.
    ranks : int
        At least 1. With one rank the time is 0.
    latency, bandwidth : float
        A message takes latency + bytes/bandwidth: seconds, and bytes per second. A rank can send
        and receive at the same time, both at full bandwidth. Adding is free.

    The grader compares with the virtual clock that the lesson's text uses.
    """
    raise NotImplementedError("task 5 is not started")


def two_level_cost(
    bytes: float,
    nodes: int,
    per_node: int,
    inside: tuple[float, float],
    across: tuple[float, float],
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
    """Task 5c: return the number of bytes from which on a broadcast in parts is faster than task 1,
    else `math.inf`.

    Return the size at which both take the same time; return `math.inf` if the broadcast in parts is
    never faster.

    In a broadcast in parts, the root cuts the buffer of n bytes into P equal chunks and scatters
    them along task 1's tree. A message holds the chunks of all ranks that get their chunk through
    its receiver: n/2 bytes, then n/4, ..., and n/P in the last round. Then lesson 02's ring
    all-gathers the chunks.

    Parameters
    ----------
    ranks : int
        A power of two, at least 2.
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
            f"8000 bytes take {', '.join(one)} microseconds on 4, 6 and 8 ranks, {two} on 2 nodes "
            "of 4; a broadcast on 8 ranks is faster in parts from "
            f"{broadcast_crossover(8, *slow):.0f} bytes on"
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
