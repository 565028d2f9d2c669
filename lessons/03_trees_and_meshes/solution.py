"""Lesson 03, solved: the package's own tree.py, recursive.py, pairwise.py and ring.py, in `minidist/collectives`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.collectives import pairwise, recursive, ring, tree
from minidist.collectives.fast import chunks_of, cut
from minidist.comm import Link

Array = np.ndarray[Any, Any]


def tree_broadcast(buffer: Array, root: int, comm: Communicator) -> None:
    """Copy the root's buffer into everybody's."""
    tree.broadcast(buffer, comm, root)


def halving_doubling(buffer: Array, comm: Communicator) -> None:
    """Replace every rank's buffer by the sum of all."""
    recursive.halving_doubling(buffer, comm, np.add)


def all_to_all(leaving: list[Array], arriving: list[Array], comm: Communicator) -> None:
    """Send chunk j of rank i to rank j, as chunk i."""
    pairwise.all_to_all(leaving, arriving, comm)


def hierarchical_all_reduce(buffer: Array, inside: Communicator, across: Communicator) -> None:
    """Sum inside nodes, across, and inside: what `hierarchical.all_reduce` does once it has found the two levels."""
    chunks = chunks_of(buffer, cut(len(buffer), inside.size))
    mine = chunks[inside.rank]
    ring.reduce_scatter(chunks, mine, inside, np.add)
    ring.all_reduce(mine, across, np.add)
    ring.all_gather(chunks, inside)


def cost(algorithm: str, bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Return how often a latency is paid, and how many bytes pass a rank's port one after the other."""
    rounds = math.log2(ranks)
    messages, passing = {
        "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks * bytes),
        "tree": (2 * rounds, 2 * rounds * bytes),
        "doubling": (rounds, rounds * bytes),
        "halving_doubling": (2 * rounds, 2 * (ranks - 1) / ranks * bytes),
    }[algorithm]
    link = Link(latency, bandwidth)
    return messages * link.latency + link.seconds(passing)


def crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Return where log2 P latencies more are made up for by fewer bytes."""
    rounds = math.log2(ranks)
    fewer = rounds - 2 * (ranks - 1) / ranks  # buffers that halving-doubling saves
    return rounds * latency * bandwidth / fewer if fewer > 0 else math.inf
