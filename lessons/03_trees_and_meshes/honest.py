"""Lesson 03, solved by hand from the handout: collectives in few rounds, and over machines of
machines.
"""

from __future__ import annotations

import math
from operator import iadd
from typing import Any

import numpy as np

from minidist import Communicator, ring

Array = np.ndarray[Any, Any]


def tree_broadcast(buffer: Array, root: int, comm: Communicator) -> None:
    """Task 1: copy the root's buffer into everybody's, in place, in ceil(log2 P) rounds."""
    number = (comm.rank - root) % comm.size  # counted from the root
    distance = 1 << (comm.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if number % (2 * distance) == 0 and number + distance < comm.size:
            comm.send(buffer, (comm.rank + distance) % comm.size)
        elif number % (2 * distance) == distance:
            comm.recv(buffer, (comm.rank - distance) % comm.size)


def halving_doubling(buffer: Array, comm: Communicator) -> None:
    """Task 2: replace every rank's buffer by the sum of all, in place: halve, then double."""
    power = 1 << (comm.size.bit_length() - 1)  # the largest power of two that is not above P
    if comm.rank >= power:
        comm.send(buffer, comm.rank - power)
        comm.recv(buffer, comm.rank - power)
        return
    helps = comm.rank + power < comm.size
    if helps:
        extra = np.empty_like(buffer)
        comm.recv(extra, comm.rank + power)
        buffer += extra
    halve_and_double(buffer, power, comm)
    if helps:
        comm.send(buffer, comm.rank + power)


def halve_and_double(buffer: Array, ranks: int, comm: Communicator) -> None:
    """Sum the buffers of the first `ranks` ranks, a power of two."""
    edges = np.cumsum([0] + [len(chunk) for chunk in np.array_split(buffer, ranks)])

    def chunks_around(rank: int, count: int) -> Array:
        first = rank - rank % count
        return buffer[edges[first] : edges[first + count]]

    distance = ranks // 2
    while distance >= 1:
        partner = comm.rank ^ distance
        kept, given = chunks_around(comm.rank, distance), chunks_around(partner, distance)
        arriving = np.empty_like(kept)
        comm.exchange(given, partner, arriving, partner)
        kept += arriving
        distance //= 2
    distance = 1
    while distance < ranks:
        partner = comm.rank ^ distance
        comm.exchange(
            chunks_around(comm.rank, distance), partner, chunks_around(partner, distance), partner
        )
        distance *= 2


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Task 3: chunk j of rank i becomes chunk i of rank j."""
    arriving[comm.rank][:] = leaving[comm.rank]
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(leaving[to], to, arriving[source], source)


def hierarchical_all_reduce(buffer: Array, inside: Communicator, across: Communicator) -> None:
    """Task 4: replace every rank's buffer by the sum over all ranks of all nodes, in place; little
    crosses nodes.
    """
    shards = np.array_split(buffer, inside.size)
    mine = shards[inside.rank]
    mine[:] = ring.ring_reduce_scatter(shards, inside, iadd)
    ring.ring_all_reduce(np.array_split(mine, across.size), across, iadd)
    ring.ring_all_gather(shards, inside)


def halving_doubling_cost(bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Task 5a: return the seconds that task 2 takes, on any number of ranks."""
    power = 1 << (ranks.bit_length() - 1)
    seconds = 2 * math.log2(power) * latency + 2 * (power - 1) / power * bytes / bandwidth
    # the whole buffer goes to a helper and comes back, for all such ranks at the same time
    if ranks > power:
        seconds += 2 * (latency + bytes / bandwidth)
    return seconds


def two_level_cost(
    bytes: float,
    nodes: int,
    per_node: int,
    inside: tuple[float, float],
    across: tuple[float, float],
) -> float:
    """Task 5b: return the seconds that task 4 takes, with lesson 02's ring on both levels."""
    shard = bytes / per_node
    one_step_inside = inside[0] + shard / inside[1]
    one_step_across = across[0] + shard / nodes / across[1]
    return 2 * (per_node - 1) * one_step_inside + 2 * (nodes - 1) * one_step_across


def broadcast_crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Task 5c: return from how many bytes on a broadcast in parts is faster than task 1; `math.inf`
    if it never is.
    """
    # the tree's whole buffers, less those of scatter and all-gather
    saved = math.log2(ranks) - 2 * (ranks - 1) / ranks
    return (ranks - 1) * latency * bandwidth / saved if saved > 0 else math.inf
