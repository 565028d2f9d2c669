"""Lesson 03, solved: the book's `ring.py` and `collectives.py`, and the package's own tree.py,
recursive.py and pairwise.py, in `minidist/full/collectives`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidist import Communicator
from minidist.collectives import hierarchical_all_reduce as on_two_levels
from minidist.full.collectives import pairwise, recursive, tree
from minidist.full.comm import Link

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
    """Sum inside nodes, across, and inside."""
    on_two_levels(buffer, inside, across)


def halving_doubling_cost(bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the time of halving and doubling among Q ranks, and of the two messages of those from
    Q on.
    """
    power = recursive.power_below(ranks)
    link = Link(latency, bandwidth)
    among = 2 * math.log2(power) * latency + link.seconds(2 * (power - 1) / power * bytes)
    return among + (2 * (latency + link.seconds(bytes)) if ranks > power else 0)


def two_level_cost(
    bytes: float,
    nodes: int,
    per_node: int,
    inside: tuple[float, float],
    across: tuple[float, float],
) -> float:
    """Return the time of two half rings inside the nodes, and of a whole one across for each
    shard.
    """
    near, far = Link(*inside), Link(*across)
    steps_inside, steps_across = 2 * (per_node - 1), 2 * (nodes - 1)
    return steps_inside * (near.latency + near.seconds(bytes / per_node)) + steps_across * (
        far.latency + far.seconds(bytes / per_node / nodes)
    )


def broadcast_crossover(ranks: int, latency: float, bandwidth: float) -> float:
    """Return the size where fewer bytes save what the ring's P - 1 latencies cost; the scatter has
    the tree's latencies.
    """
    # buffers that leave the root, and then each rank
    fewer = math.log2(ranks) - 2 * (ranks - 1) / ranks
    return (ranks - 1) * latency * bandwidth / fewer if fewer > 0 else math.inf
